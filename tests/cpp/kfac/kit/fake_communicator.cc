#include "kit/fake_communicator.h"

#include <chrono>
#include <utility>

#include <c10/util/Exception.h>

#include "c10d/backend/torch_compat.h"

namespace torchext::kit {
namespace {

// A transfer that is over.
class DoneWork final : public CompatWork {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }

 protected:
  std::chrono::milliseconds workTimeout() const override { return std::chrono::milliseconds(0); }
};

// A transfer that ends in wait(), once.
class LateWork final : public CompatWork {
 public:
  explicit LateWork(std::function<void()> end) : end_(std::move(end)) {}
  bool isCompleted() override { return !end_; }
  bool isSuccess() const override { return !end_; }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    if (end_) {
      end_();
      end_ = nullptr;
    }
    return true;
  }

 protected:
  std::chrono::milliseconds workTimeout() const override { return std::chrono::milliseconds(0); }

 private:
  std::function<void()> end_;
};

[[noreturn]] void fail(const std::string& why) { C10_THROW_ERROR(DistBackendError, why); }

at::Tensor sumOf(const std::map<int, at::Tensor>& tensors) {
  at::Tensor sum;
  for (const auto& [rank, tensor] : tensors) {
    sum = sum.defined() ? sum + tensor : tensor.clone();
  }
  return sum;
}

}  // namespace

void Meeting::dieAt(int rank, int calls) {
  const std::lock_guard lock(mutex_);
  left_[rank] = calls;
}

void Meeting::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
}

void Meeting::enter(int rank) {
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    fail("the job was aborted");
  }
  const auto left = left_.find(rank);
  if (gone_.contains(rank) || (left != left_.end() && --left->second <= 0)) {
    gone_.insert(rank);
    changed_.notify_all();
    fail(c10::str("this is rank ", rank, ", which is gone"));
  }
}

void Meeting::checkAlive(const std::function<bool(int)>& needs) const {
  if (aborted_) {
    fail("the job was aborted");
  }
  for (const int rank : gone_) {
    if (needs(rank)) {
      fail(c10::str("rank ", rank, " is gone"));
    }
  }
}

void Meeting::post(Box box, const at::Tensor& message) {
  const std::lock_guard lock(mutex_);
  boxes_[box].push_back(message.clone());
  changed_.notify_all();
}

void Meeting::fetch(const Box& box, const at::Tensor& into) {
  std::unique_lock lock(mutex_);
  std::deque<at::Tensor>& messages = boxes_[box];
  while (messages.empty()) {
    checkAlive([&](int rank) { return rank == std::get<0>(box); });
    changed_.wait(lock);
  }
  // A receive may be longer than what comes.
  const at::Tensor flat = messages.front().flatten();
  into.view({-1}).narrow(0, 0, flat.numel()).copy_(flat);
  messages.pop_front();
}

std::uint64_t Meeting::join(int rank, const at::Tensor& own) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = next_[rank]++;
  calls_[number].from[rank] = own.clone();
  changed_.notify_all();
  return number;
}

at::Tensor Meeting::complete(std::uint64_t number,
                             const std::function<at::Tensor(const std::map<int, at::Tensor>&)>& make) {
  std::unique_lock lock(mutex_);
  Call& call = calls_[number];
  while (call.from.size() < static_cast<std::size_t>(size_)) {
    checkAlive([&](int rank) { return !call.from.contains(rank); });
    changed_.wait(lock);
  }
  return make(call.from);
}

FakeCommunicator::FakeCommunicator(std::shared_ptr<Meeting> meeting, int rank, Way way)
    : Communicator(
          rank, meeting->size(),
          {.overlaps = way == Way::kMessages, .sums_at_once = way == Way::kMemory, .adds_shares = way != Way::kMemory}),
      meeting_(std::move(meeting)),
      way_(way) {}

Communicator::Sum FakeCommunicator::allReduce(at::Tensor slice) {
  meeting_->enter(rank());
  const std::uint64_t number = meeting_->join(rank(), slice);
  return Sum({c10::make_intrusive<LateWork>(
      [meeting = meeting_, number, slice = std::move(slice)] { slice.copy_(meeting->complete(number, &sumOf)); })});
}

Communicator::Sum FakeCommunicator::reduce(at::Tensor slice, int root, int tag, const at::Tensor& shares) {
  if (rank() != root) {
    return Sum({send(slice, root, tag)});
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

Communicator::Work FakeCommunicator::broadcast(at::Tensor slice, int root) {
  meeting_->enter(rank());
  const std::uint64_t number = meeting_->join(rank(), slice);
  return c10::make_intrusive<LateWork>([meeting = meeting_, number, root, slice = std::move(slice)] {
    slice.copy_(meeting->complete(number, [root](const auto& tensors) { return tensors.at(root); }));
  });
}

Communicator::Work FakeCommunicator::send(at::Tensor slice, int to, int tag) {
  meeting_->enter(rank());
  bytes_.sent += static_cast<std::int64_t>(slice.nbytes());
  meeting_->post({rank(), to, tag}, slice);
  return c10::make_intrusive<DoneWork>();
}

Communicator::Work FakeCommunicator::receive(at::Tensor slice, int from, int tag) {
  meeting_->enter(rank());
  return c10::make_intrusive<LateWork>([meeting = meeting_, box = Meeting::Box{from, rank(), tag},
                                        slice = std::move(slice)] { meeting->fetch(box, slice); });
}

void FakeCommunicator::sumAtOnce(const at::Tensor& data, const std::vector<core::Span>& spans) {
  meeting_->enter(rank());
  const at::Tensor sum = meeting_->complete(meeting_->join(rank(), data), &sumOf);
  for (const core::Span& span : spans) {
    const auto begin = static_cast<std::int64_t>(span.begin);
    const auto count = static_cast<std::int64_t>(span.count);
    data.narrow(0, begin, count).copy_(sum.narrow(0, begin, count));
  }
}

void FakeCommunicator::copyParts(const std::vector<at::Tensor>& parts) {
  for (int from = 0; from < size(); ++from) {
    const at::Tensor& part = parts[static_cast<std::size_t>(from)];
    if (part.defined() && part.numel() > 0) {
      broadcast(part, from)->wait();
    }
  }
}

void FakeCommunicator::bring(Parcels parcels) {
  if (way_ != Way::kMemory) {
    Communicator::bring(parcels);
    return;
  }
  for (const std::vector<at::Tensor>& parts : copiesOf(parcels)) {
    copyParts(parts);
  }
}

void FakeCommunicator::agree(const AgreementFields& /*fields*/) { mean(0); }

double FakeCommunicator::mean(double value) {
  const at::Tensor sum = at::full({1}, value, at::kDouble);
  allReduce(sum).wait();
  return sum.item<double>() / size();
}

std::vector<double> FakeCommunicator::fromRankZero(const std::vector<double>& values) {
  const at::Tensor shared = at::tensor(values, at::kDouble);
  broadcast(shared, 0)->wait();
  const auto* data = shared.const_data_ptr<double>();
  return {data, data + values.size()};
}

void FakeCommunicator::measure(at::Device /*device*/, std::size_t /*most*/, core::KfacCosts& costs) {
  mean(0);
  costs.all_reduce = kAllReduce;
  costs.broadcast = kBroadcast;
}

std::function<void()> FakeCommunicator::watch() const {
  return [meeting = meeting_] {
    const std::lock_guard lock(meeting->mutex_);
    meeting->checkAlive([](int /*rank*/) { return false; });
  };
}

}  // namespace torchext::kit
