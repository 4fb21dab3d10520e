#include "kfac/comm/message_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <numeric>
#include <string>

#include "core/base/host_identity.h"
#include "core/transport/alpha_beta.h"
#include "kfac/base/scoped_timer.h"

namespace torchext {
namespace {

std::int64_t bytesOf(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()); }

constexpr int kEverybody = -1;  // a collective's peer

// How long a look for what is no work blocks.
constexpr std::chrono::milliseconds kLook{20};

// What a peer sent is malformed: the error of this rank, for which the others wait as long as the group lets them.
std::exception_ptr malformedError(int peer, const char* what, const std::string& error) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
                                                       c10::str(what, " with rank ", peer, ": ", error)));
}

// What is no work waits as long as those do.
PointToPoint transportOver(const c10::intrusive_ptr<c10d::Backend>& backend,
                           const std::shared_ptr<ExchangeWaits>& waits) {
  const auto wait = [waits](const PointToPoint::WorkPtr& work, int peer, const char* /*what*/) {
    waits->start(at::kCPU, peer, [&] { return work; })->wait();
  };
  const auto wait_until = [waits](const PointToPoint::Look& look, int peer, const char* what) {
    const auto limit = waits->timeout();
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!look(kLook)) {
      if (std::chrono::steady_clock::now() >= end) {
        C10_THROW_ERROR(DistBackendError, c10::str(what, ": rank ", peer, " did not come within ",
                                                   std::chrono::duration<double>(limit).count(),
                                                   " s; do all ranks take the same steps?"));
      }
      waits->look();
    }
  };
  return {backend, wait, wait_until, &malformedError};
}

}  // namespace

double fastestSeconds(at::Device device, int repeats, const std::function<void()>& call) {
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    waitForDevice(device);
    const double start = monotonicSeconds();
    call();
    waitForDevice(device);
    best = std::min(best, monotonicSeconds() - start);
  }
  return best;
}

MessageCommunicator::MessageCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                         std::shared_ptr<GroupHealth> model, Manner manner)
    : Communicator(group->getRank(), group->getSize(), manner),
      group_(std::move(group)),
      waits_(std::make_shared<ExchangeWaits>(group_->getBackend(c10::DeviceType::CPU), std::move(model))) {}

std::function<void()> MessageCommunicator::watch() const {
  return [waits = waits_] { waits->look(); };
}

Communicator::Sum MessageCommunicator::allReduce(at::Tensor slice) {
  bytes_.all_reduce += bytesOf(slice);
  std::vector<at::Tensor> tensors{std::move(slice)};
  return Sum({waits_->start(tensors.front().device(), kEverybody,
                            [&] { return group_->allreduce(tensors, c10d::AllreduceOptions()); })});
}

Communicator::Sum MessageCommunicator::reduce(at::Tensor slice, int root, int tag, const at::Tensor& shares) {
  bytes_.reduce += bytesOf(slice);
  std::vector<at::Tensor> tensors{slice};
  if (!slice.is_cpu()) {
    c10d::ReduceOptions options;
    options.rootRank = root;
    return Sum({waits_->start(slice.device(), kEverybody, [&] { return group_->reduce(tensors, options); })});
  }
  if (rank() != root) {
    return Sum({waits_->start(at::kCPU, root, [&] { return group_->send(tensors, root, tag); })});
  }
  const at::Tensor of_others = shares.view({size() - 1, slice.numel()});
  std::vector<Work> works;
  for (int from = 0; from < size(); ++from) {
    if (from != root) {
      works.push_back(receive(of_others.select(0, static_cast<std::int64_t>(works.size())), from, tag));
    }
  }
  return Sum(std::move(works), std::move(slice), of_others);
}

Communicator::Work MessageCommunicator::broadcast(at::Tensor slice, int root) {
  bytes_.broadcast += bytesOf(slice);
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{std::move(slice)};
  return waits_->start(tensors.front().device(), kEverybody, [&] { return group_->broadcast(tensors, options); });
}

Communicator::Work MessageCommunicator::send(at::Tensor slice, int to, int tag) {
  bytes_.sent += bytesOf(slice);
  std::vector<at::Tensor> tensors{std::move(slice)};
  return waits_->start(tensors.front().device(), to, [&] { return group_->send(tensors, to, tag); });
}

Communicator::Work MessageCommunicator::receive(at::Tensor slice, int from, int tag) {
  std::vector<at::Tensor> tensors{std::move(slice)};
  return waits_->start(tensors.front().device(), from, [&] { return group_->recv(tensors, from, tag); });
}

std::unique_ptr<WindowGather> MessageCommunicator::shareMemory() {
  // Addresses go to every rank from every other: only where it may come to something.
  const at::Tensor own = at::full({1}, agreementHash(core::processSpace()), at::kLong);
  const at::Tensor all = at::empty({size(), 1}, at::kLong);
  agreement().gather(own, all);
  if (!all.eq(own).all().item<bool>()) {
    return nullptr;
  }
  const PointToPoint transport = transportOver(group_->getBackend(c10::DeviceType::CPU), waits_);
  constexpr int kTag = 0;
  auto windows = SharedWindows::open(transport, kTag, /*enabled=*/true);
  std::vector<int> everybody(static_cast<std::size_t>(size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  if (!windows || !windows->cover(everybody)) {
    return nullptr;
  }
  return std::make_unique<WindowGather>(std::move(windows), transport, "torchext.optim: K-FAC's exchange");
}

AgreementGroup MessageCommunicator::agreement() {
  return {size(),
          [this](const at::Tensor& own, const at::Tensor& all) {
            std::vector<at::Tensor> inputs{own};
            std::vector<std::vector<at::Tensor>> outputs{all.unbind()};
            waits_
                ->start(at::kCPU, kEverybody,
                        [&] { return group_->allgather(outputs, inputs, c10d::AllgatherOptions()); })
                ->wait();
          },
          [this](const at::Tensor& tensor, int root) {
            const ExchangeBytes counted = bytes_;
            broadcast(tensor, root)->wait();
            bytes_ = counted;
          }};
}

void MessageCommunicator::agree(const AgreementFields& fields) {
  torchext::agree(agreement(), "torchext.optim", fields, "all ranks must pass the same model and the same options");
}

// A few all-reduces and broadcasts of 4 KiB to 4 MiB.
void MessageCommunicator::measure(at::Device device, std::size_t most, core::KfacCosts& costs) {
  constexpr int kRepeats = 3;
  const ExchangeBytes counted = bytes_;
  std::vector<std::size_t> bytes;
  std::vector<double> all_reduces;  // seconds
  std::vector<double> broadcasts;
  constexpr std::size_t kAlways = 64 << 10;  // with the smallest, enough for the fit
  for (const std::int64_t elements : {1LL << 10, 1LL << 14, 1LL << 17, 1LL << 20}) {
    if (static_cast<std::size_t>(elements) * sizeof(float) > std::max(most, kAlways)) {
      break;
    }
    const at::Tensor data = at::zeros({elements}, at::TensorOptions(at::kFloat).device(device));
    allReduce(data).wait();  // connects
    all_reduces.push_back(fastestSeconds(device, kRepeats, [&] { allReduce(data).wait(); }));
    // A broadcast's root is done when it has sent; there and back again takes twice its time everywhere.
    const auto there_and_back = [&] {
      broadcast(data, 0)->wait();
      broadcast(data, size() - 1)->wait();
    };
    broadcasts.push_back(fastestSeconds(device, kRepeats, there_and_back) / 2);
    bytes.push_back(data.nbytes());
  }
  costs.all_reduce = fitted(bytes, all_reduces);
  costs.broadcast = fitted(bytes, broadcasts);
  bytes_ = counted;
}

core::AlphaBeta MessageCommunicator::fitted(const std::vector<std::size_t>& bytes, std::vector<double> seconds) {
  seconds = fromRankZero(seconds);
  std::vector<core::CommSample> samples;
  samples.reserve(bytes.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    samples.push_back({bytes[i], std::max(seconds[i], 1e-9)});
  }
  return core::fitAlphaBeta(samples);
}

double MessageCommunicator::mean(double value) {
  const ExchangeBytes counted = bytes_;
  const at::Tensor sum = at::full({1}, value, at::kDouble);
  allReduce(sum).wait();
  bytes_ = counted;
  return sum.item<double>() / size();
}

std::vector<double> MessageCommunicator::fromRankZero(const std::vector<double>& values) {
  const at::Tensor shared = at::empty({static_cast<std::int64_t>(values.size())}, at::kDouble);
  auto* data = shared.mutable_data_ptr<double>();
  std::copy(values.begin(), values.end(), data);
  broadcast(shared, 0)->wait();
  return {data, data + values.size()};
}

}  // namespace torchext
