#include "ddp/factors/row_links.h"

#include <chrono>
#include <exception>
#include <utility>

#include "c10d/backend/torch_compat.h"
#include "c10d/fault/explain_error.h"

namespace torchext {
namespace {

// A message whose wait is that of its transport.
class RowWork final : public CompatWork {
 public:
  RowWork(PointToPoint transport, PointToPoint::WorkPtr inner, int peer, const char* what)
      : transport_(std::move(transport)), inner_(std::move(inner)), peer_(peer), what_(what) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    transport_.wait(inner_, peer_, what_);
    return true;
  }

 protected:
  std::chrono::milliseconds workTimeout() const override { return kNoTimeout; }

 private:
  const PointToPoint transport_;
  const PointToPoint::WorkPtr inner_;
  const int peer_;
  const char* const what_;
};

}  // namespace

std::optional<RowLinks> rowLinks(AttachableBackend& group, const char* what) {
  if (group.getSize() == 1) {
    return std::nullopt;
  }
  const PointToPoint transport = group.dataTransport();
  const auto post = [transport, health = group.health(), what](int peer, const auto& call) -> RowLinks::Work {
    PointToPoint::WorkPtr work;
    try {
      work = call(transport);
    } catch (...) {
      // Gloo refuses a message to one that has died, maybe before anybody has said so.
      std::rethrow_exception(explain(*health, std::current_exception(), {.name = what, .peer = peer}));
    }
    return c10::make_intrusive<RowWork>(transport, std::move(work), peer, what);
  };
  return RowLinks{
      .rank = transport.rank(),
      .ranks = transport.size(),
      .send = [post](const at::Tensor& rows, int to,
                     int tag) { return post(to, [&](const PointToPoint& over) { return over.send(rows, to, tag); }); },
      .receive =
          [post](const at::Tensor& rows, int from, int tag) {
            return post(from, [&](const PointToPoint& over) { return over.recv(rows, from, tag); });
          },
      .gather = nullptr};
}

int rowTags(AttachableBackend& group, std::size_t count) {
  const int first = group.nextChannel();
  for (std::size_t tags = AttachableBackend::kTagsPerChannel; tags < count;
       tags += AttachableBackend::kTagsPerChannel) {
    group.nextChannel();
  }
  return first;
}

}  // namespace torchext
