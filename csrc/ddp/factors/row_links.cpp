#include "ddp/factors/row_links.h"

#include <chrono>
#include <utility>

#include "c10d/backend/torch_compat.h"

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

RowLinks rowLinks(const PointToPoint& transport, const char* what) {
  return {.rank = transport.rank(),
          .ranks = transport.size(),
          .send = [transport, what](const at::Tensor& rows, int to, int tag) -> RowLinks::Work {
            return c10::make_intrusive<RowWork>(transport, transport.send(rows, to, tag), to, what);
          },
          .receive = [transport, what](const at::Tensor& rows, int from, int tag) -> RowLinks::Work {
            return c10::make_intrusive<RowWork>(transport, transport.recv(rows, from, tag), from, what);
          },
          .gather = nullptr};
}

}  // namespace torchext
