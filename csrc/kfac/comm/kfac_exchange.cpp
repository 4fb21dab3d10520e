#include "kfac/comm/kfac_exchange.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <numeric>
#include <string>

#include "core/base/host_identity.h"
#include "kfac/base/scoped_timer.h"

namespace torchext {
namespace {

std::int64_t bytesOf(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()); }

template <class Call>
double fastestSeconds(at::Device device, int repeats, const Call& call) {
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

KfacExchange::KfacExchange(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<GroupHealth> model)
    : group_(std::move(group)),
      waits_(std::make_shared<ExchangeWaits>(group_->getBackend(c10::DeviceType::CPU), std::move(model))) {}

void KfacExchange::Sum::wait() {
  for (std::size_t i = 0; i < works_.size(); ++i) {
    works_[i]->wait();
    if (slice_.defined()) {
      slice_.add_(shares_.select(0, static_cast<std::int64_t>(i)));
    }
  }
  *this = Sum();
}

KfacExchange::Sum KfacExchange::allReduce(at::Tensor slice) {
  bytes_.all_reduce += bytesOf(slice);
  std::vector<at::Tensor> tensors{std::move(slice)};
  Sum sum;
  sum.works_.push_back(waits_->start(tensors.front().device(), kEverybody,
                                     [&] { return group_->allreduce(tensors, c10d::AllreduceOptions()); }));
  return sum;
}

KfacExchange::Sum KfacExchange::reduce(at::Tensor slice, int root, int tag, const at::Tensor& shares) {
  bytes_.reduce += bytesOf(slice);
  Sum sum;
  if (!slice.is_cpu()) {
    c10d::ReduceOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{std::move(slice)};
    sum.works_.push_back(
        waits_->start(tensors.front().device(), kEverybody, [&] { return group_->reduce(tensors, options); }));
  } else if (rank() != root) {
    std::vector<at::Tensor> tensors{std::move(slice)};
    sum.works_.push_back(waits_->start(at::kCPU, root, [&] { return group_->send(tensors, root, tag); }));
  } else {
    sum.shares_ = shares.view({size() - 1, slice.numel()});
    for (int from = 0; from < size(); ++from) {
      if (from != root) {
        sum.works_.push_back(receive(sum.shares_.select(0, static_cast<std::int64_t>(sum.works_.size())), from, tag));
      }
    }
    sum.slice_ = std::move(slice);
  }
  return sum;
}

KfacExchange::Work KfacExchange::broadcast(at::Tensor slice, int root) {
  bytes_.broadcast += bytesOf(slice);
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{std::move(slice)};
  return waits_->start(tensors.front().device(), kEverybody, [&] { return group_->broadcast(tensors, options); });
}

KfacExchange::Work KfacExchange::send(at::Tensor slice, int to, int tag) {
  bytes_.sent += bytesOf(slice);
  std::vector<at::Tensor> tensors{std::move(slice)};
  return waits_->start(tensors.front().device(), to, [&] { return group_->send(tensors, to, tag); });
}

KfacExchange::Work KfacExchange::receive(at::Tensor slice, int from, int tag) {
  std::vector<at::Tensor> tensors{std::move(slice)};
  return waits_->start(tensors.front().device(), from, [&] { return group_->recv(tensors, from, tag); });
}

std::vector<KfacExchange::Work> KfacExchange::start(const std::vector<Message>& messages) {
  std::vector<Work> works;
  const bool together = !messages.empty() && !messages.front().slice.is_cpu();
  const auto device = together ? messages.front().slice.device().type() : at::kCPU;
  if (together) {
    group_->startCoalescing(device);
  }
  for (const Message& message : messages) {
    const Work work = message.sends ? send(message.slice, message.peer, message.tag)
                                    : receive(message.slice, message.peer, message.tag);
    if (!together) {
      works.push_back(work);
    }
  }
  if (together) {
    if (const Work work = group_->endCoalescing(device)) {
      works.push_back(work);
    }
  }
  return works;
}

std::vector<KfacExchange::Work> KfacExchange::gather(const at::Tensor& all, int tag) {
  std::vector<Work> works;
  for (int distance = 1; distance < size(); ++distance) {
    const int from = (rank() + size() - distance) % size();
    works.push_back(receive(all.narrow(0, from, 1), from, tag));
    works.push_back(send(all.narrow(0, rank(), 1), (rank() + distance) % size(), tag));
  }
  return works;
}

void KfacExchange::wait(std::vector<Work>& works) {
  for (const Work& work : works) {
    work->wait();
  }
  works.clear();
}

void KfacExchange::shareMemory() {
  // Addresses go to every rank from every other: only where it may come to something.
  const at::Tensor own = at::full({1}, agreementHash(core::processSpace()), at::kLong);
  const at::Tensor all = at::empty({size(), 1}, at::kLong);
  agreement().gather(own, all);
  if (!all.eq(own).all().item<bool>()) {
    return;
  }
  const PointToPoint transport = transportOver(group_->getBackend(c10::DeviceType::CPU), waits_);
  constexpr int kTag = 0;
  auto windows = SharedWindows::open(transport, kTag, /*enabled=*/true);
  std::vector<int> everybody(static_cast<std::size_t>(size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  if (windows && windows->cover(everybody)) {
    gather_ = std::make_unique<WindowGather>(std::move(windows), transport, "torchext.optim: K-FAC's exchange");
  }
}

void KfacExchange::gatherParts(const std::vector<at::Tensor>& parts) {
  waits_->checkUsable();
  std::vector<WindowGather::Part> all(parts.size());
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].defined() && parts[rank].numel() > 0) {
      TORCH_INTERNAL_ASSERT(parts[rank].is_contiguous() && parts[rank].is_cpu());
      all[rank] = {static_cast<std::byte*>(parts[rank].data_ptr()), parts[rank].nbytes()};
    }
  }
  bytes_.shared += static_cast<std::int64_t>(all[static_cast<std::size_t>(rank())].bytes);
  gather_->run(all);
}

void KfacExchange::sumParts(const at::Tensor& data, const std::vector<core::Span>& spans) {
  waits_->checkUsable();
  TORCH_INTERNAL_ASSERT(data.is_contiguous() && data.is_cpu());
  bytes_.shared += bytesOf(data);
  gather_->sum({static_cast<std::byte*>(data.data_ptr()), data.nbytes()}, reductionFor(data.scalar_type()), spans);
}

std::vector<core::CommSample> KfacExchange::measureSharing() {
  constexpr int kRepeats = 5;
  const ExchangeBytes counted = bytes_;
  std::vector<core::CommSample> samples;
  std::vector<double> seconds;
  for (const std::int64_t elements : {1LL << 8, 1LL << 12, 1LL << 16}) {
    const at::Tensor data = at::zeros({size(), elements}, at::kFloat);
    const auto parts = data.unbind();
    mean(0);  // all begin together
    seconds.push_back(fastestSeconds(at::kCPU, kRepeats, [&] { gatherParts(parts); }));
    samples.push_back({static_cast<std::size_t>(bytesOf(data)), 0});
  }
  seconds = fromRankZero(seconds);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].seconds = std::max(seconds[i], 1e-9);
  }
  bytes_ = counted;
  return samples;
}

AgreementGroup KfacExchange::agreement() {
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

void KfacExchange::agree(const AgreementFields& fields) {
  torchext::agree(agreement(), "torchext.optim", fields, "all ranks must pass the same model and the same options");
}

void KfacExchange::measure(at::Device device, std::size_t most, std::vector<core::CommSample>& all_reduce,
                           std::vector<core::CommSample>& broadcast) {
  constexpr int kRepeats = 3;
  const ExchangeBytes counted = bytes_;
  std::vector<double> seconds;
  constexpr std::size_t kAlways = 64 << 10;  // with the smallest, enough for the fit
  for (const std::int64_t elements : {1LL << 10, 1LL << 14, 1LL << 17, 1LL << 20}) {
    if (static_cast<std::size_t>(elements) * sizeof(float) > std::max(most, kAlways)) {
      break;
    }
    const at::Tensor data = at::zeros({elements}, at::TensorOptions(at::kFloat).device(device));
    const auto bytes = static_cast<std::size_t>(bytesOf(data));
    allReduce(data).wait();  // connects
    all_reduce.push_back({bytes, fastestSeconds(device, kRepeats, [&] { allReduce(data).wait(); })});
    // A broadcast's root is done when it has sent; there and back again takes twice its time everywhere.
    const int last = size() - 1;
    const auto there_and_back = [&] {
      this->broadcast(data, 0)->wait();
      this->broadcast(data, last)->wait();
    };
    broadcast.push_back({bytes, fastestSeconds(device, kRepeats, there_and_back) / 2});
    seconds.insert(seconds.end(), {all_reduce.back().seconds, broadcast.back().seconds});
  }
  seconds = fromRankZero(seconds);
  for (std::size_t i = 0; i < all_reduce.size(); ++i) {
    all_reduce[i].seconds = std::max(seconds[2 * i], 1e-9);
    broadcast[i].seconds = std::max(seconds[2 * i + 1], 1e-9);
  }
  bytes_ = counted;
}

double KfacExchange::mean(double value) {
  const ExchangeBytes counted = bytes_;
  const at::Tensor sum = at::full({1}, value, at::kDouble);
  allReduce(sum).wait();
  bytes_ = counted;
  return sum.item<double>() / size();
}

std::vector<double> KfacExchange::fromRankZero(const std::vector<double>& values) {
  const at::Tensor shared = at::empty({static_cast<std::int64_t>(values.size())}, at::kDouble);
  auto* data = shared.mutable_data_ptr<double>();
  std::copy(values.begin(), values.end(), data);
  broadcast(shared, 0)->wait();
  return {data, data + values.size()};
}

}  // namespace torchext
