// The averages of GroupSynchronizer: rounds, deferred ones, and the exact one of all replicas.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "c10d/fault/fault_points.h"
#include "ddp/averaging/group_synchronizer.h"
#include "ddp/common/buffer_mean.h"
#include "ddp/common/elapsed.h"

namespace torchext {
namespace {

// Every bucket of every group is a call of its own.
std::uint64_t callId(const AssignedGroup& group, std::size_t bucket) {
  return group.id * GroupSynchronizer::kMaxBuckets + bucket;
}

// of(position, begin, count): of each tensor, where it stands in the bucket.
template <class Of>
void eachTensor(const FlatBucket& bucket, Of of) {
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < bucket.tensors.size(); ++i) {
    of(bucket.positions[i], begin, bucket.tensors[i].numel());
    begin += bucket.tensors[i].numel();
  }
}

// Where it holds for all of a tensor: one statistic has one meaning, and a mean may be positive here and there by
// chance.
at::Tensor ofWholeTensors(const FlatBucket& bucket, const at::Tensor& holds) {
  at::Tensor result = at::empty_like(holds);
  eachTensor(bucket, [&](std::size_t /*position*/, std::int64_t begin, std::int64_t count) {
    const at::Tensor part = result.narrow(0, begin, count);
    part.copy_(holds.narrow(0, begin, count).all().expand_as(part));
  });
  return result;
}

}  // namespace

void GroupSynchronizer::averageTask(std::int64_t round, FlightRecord& record) {
  at::NoGradGuard no_grad;
  try {
    if (!source_->scheduled()) {
      // To ask is to owe an average. A GPU's collective is only queued, it is over when all ranks have joined it, and
      // no copy of the parameters gets past it: owed before that, the average waits for ranks that may wait for it. So
      // what is queued ends first. A later collective waits for this round before it is queued (OutstandingAverages).
      parameters_.synchronizeDevices();
      buffers_.synchronizeDevices();
    }
    AssignedGroup group;
    {
      RECORD_FUNCTION("torchext::wait_generator", std::vector<c10::IValue>{});
      const auto start = Clock::now();
      group = source_->next(round);
      std::lock_guard<std::mutex> lock(mutex_);
      stats_.generator_wait_ms += millisecondsSince(start);
      stats_.iteration_gap = group.behind;
    }
    averageNow(group);
    source_->finished(group);
    record.done();
  } catch (...) {
    fail(std::current_exception());
  }
  for (std::size_t i = 0; i < bucketCount(); ++i) {
    release(i);
  }
}

void GroupSynchronizer::averageNow(const AssignedGroup& group) {
  const auto members = static_cast<std::int64_t>(group.members.size());
  if (members < 2) {
    return;
  }
  RECORD_FUNCTION("torchext::average", std::vector<c10::IValue>{});
  for (std::size_t i = 0; i < bucketCount(); ++i) {
    reduceBucket(i, group);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.averages;
  ++stats_.group_sizes[members];
  stats_.bytes_sent = static_cast<std::int64_t>(partial_->bytesSent());
  stats_.bytes_shared = static_cast<std::int64_t>(partial_->bytesShared());
  if (combine_then_adapt_) {
    apply_members_ = members;
  }
}

void GroupSynchronizer::reduceBucket(std::size_t index, const AssignedGroup& group) {
  const FlatBucket& current = bucket(index);
  const bool buffer = index >= parameters_.size();
  const auto start = Clock::now();
  if (combine_then_adapt_ && buffer) {
    current.transfer_buffer.copy_(before_[index]);  // from before the forward could change them
  } else {
    current.pack();
  }
  if (combine_then_adapt_ && !buffer) {
    keep(index);
  }
  const auto packed = Clock::now();
  const double peers_before = partial_->peerSeconds();
  faultPoint(FaultPoint::kAveragePacked);
  addUp(index, group);
  faultPoint(FaultPoint::kAverageReduced);
  const auto reduced = Clock::now();
  if (!combine_then_adapt_) {
    current.unpack(scaleOf(index, static_cast<std::int64_t>(group.members.size())));
    if (index + 1 < bucketCount()) {
      release(index);  // the last one closes the round: averageTask releases it, after everything else
    }
  }
  const double peer_ms = 1e3 * (partial_->peerSeconds() - peers_before);
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.copy_ms += millisecondsSince(start) - milliseconds(reduced - packed);
  stats_.peer_wait_ms += peer_ms;
  stats_.transfer_ms += milliseconds(reduced - packed) - peer_ms;
}

// Over the group: what scaleOf() makes a mean.
void GroupSynchronizer::addUp(std::size_t index, const AssignedGroup& group) {
  const at::Tensor& transfer_buffer = bucket(index).transfer_buffer;
  const auto members = static_cast<std::int64_t>(group.members.size());
  if (index >= parameters_.size()) {
    const at::Tensor sum = toSum(transfer_buffer);
    partial_->run(sum, group.members, callId(group, index), 1.0);
    toMean(sum, members, transfer_buffer);
  } else if (transfer_buffer.scalar_type() == at::kHalf) {
    // The last addition and its scale are float32's; the sum of all but one must be in the range of float16.
    const double room = std::exp2(std::ceil(std::log2(static_cast<double>(members - 1))));
    if (room > 1.0) {
      transfer_buffer.div_(room);
    }
    partial_->run(transfer_buffer, group.members, callId(group, index), room / static_cast<double>(members));
  } else {
    partial_->run(transfer_buffer, group.members, callId(group, index), 1.0);
  }
}

// By which to multiply what addUp() has left. Of parameters the sum, as the scale is applied where the result is copied
// back, in the same pass; but the mean of float16, of which the sum may be infinite. Of buffers the mean.
double GroupSynchronizer::scaleOf(std::size_t index, std::int64_t members) const {
  const bool summed = index < parameters_.size() && bucket(index).transfer_buffer.scalar_type() != at::kHalf;
  return summed ? 1.0 / static_cast<double>(members) : 1.0;
}

at::Tensor GroupSynchronizer::meanOf(std::size_t index, std::int64_t members) const {
  const at::Tensor& transfer_buffer = bucket(index).transfer_buffer;
  const double scale = scaleOf(index, members);
  return scale < 1.0 ? transfer_buffer.mul(scale) : transfer_buffer.clone();
}

void GroupSynchronizer::applyPending() {
  const std::int64_t members = std::exchange(apply_members_, 0);
  if (members == 0) {
    return;
  }
  RECORD_FUNCTION("torchext::apply", std::vector<c10::IValue>{});
  at::NoGradGuard no_grad;
  const std::vector<Write> writes = tensors_.endRound();
  const auto written = [&writes](std::size_t position) { return writes[position] != Write::kNone; };
  for (std::size_t i = 0; i < bucketCount(); ++i) {
    const FlatBucket& current = bucket(i);
    const bool buffer = i >= parameters_.size();
    if (!buffer && std::none_of(current.positions.begin(), current.positions.end(), written)) {
      current.unpack(scaleOf(i, members));
      continue;
    }
    const at::Tensor mean = meanOf(i, members);
    current.pack();
    if (buffer) {
      const at::Tensor moved = carry(mean, current.transfer_buffer, before_[i]);
      current.transfer_buffer.copy_(
          keepSign(moved, current.transfer_buffer, ofWholeTensors(current, nonnegative(mean, before_[i]))));
    } else {
      eachTensor(current, [&](std::size_t position, std::int64_t begin, std::int64_t count) {
        const at::Tensor now = current.transfer_buffer.narrow(0, begin, count);
        if (writes[position] == Write::kNone) {
          now.copy_(mean.narrow(0, begin, count));
        } else if (writes[position] == Write::kAgain) {
          now.copy_(carry(mean.narrow(0, begin, count), now, before_[i].narrow(0, begin, count)));
        }
      });
    }
    current.unpack(1.0);
  }
}

AverageDone GroupSynchronizer::beginOutstanding(WaitingFor what) {
  if (detached_ || failed_ || meeting_ || source_->scheduled() || inForkedChild()) {  // whose thread there is not
    return {};
  }
  return beginOnThread([this, what] {
    const std::lock_guard<std::mutex> lock(state_);
    deferPending();
    source_->pause(what, [this](const AssignedGroup& group) { averageDeferred(group); });
  });
}

void GroupSynchronizer::averageDeferred(const AssignedGroup& group) {
  const auto members = static_cast<std::int64_t>(group.members.size());
  if (members < 2) {
    return;
  }
  if (deferred_.empty()) {
    tensors_.note();
    deferred_.resize(bucketCount());
  }
  for (std::size_t i = 0; i < bucketCount(); ++i) {
    const FlatBucket& current = bucket(i);
    current.pack();
    const at::Tensor local = current.transfer_buffer.clone();
    if (deferred_[i].defined()) {
      current.transfer_buffer.add_(deferred_[i]);
    }
    addUp(i, group);
    const at::Tensor mean = meanOf(i, members);
    deferred_[i] = i < parameters_.size() ? mean.sub(local) : change(mean, local);
    if (i >= parameters_.size()) {
      noteSigns(i, ofWholeTensors(current, nonnegative(mean, local)));
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.averages;
  ++stats_.group_sizes[members];
  stats_.bytes_sent = static_cast<std::int64_t>(partial_->bytesSent());
  stats_.bytes_shared = static_cast<std::int64_t>(partial_->bytesShared());
}

// cta: the average that waits for the next step lives in the buckets, which a deferred one is about to use.
void GroupSynchronizer::deferPending() {
  const std::int64_t members = std::exchange(apply_members_, 0);
  if (members == 0) {
    return;
  }
  deferred_.resize(bucketCount());
  for (std::size_t i = 0; i < bucketCount(); ++i) {
    at::Tensor difference = meanOf(i, members);
    if (i < parameters_.size()) {
      bucket(i).pack();
      eachTensor(bucket(i), [&](std::size_t position, std::int64_t begin, std::int64_t count) {
        const Write write = tensors_.write(position);
        const at::Tensor& packed = write == Write::kAgain ? before_[i] : bucket(i).transfer_buffer;
        const at::Tensor part = difference.narrow(0, begin, count);
        write == Write::kNow ? part.zero_() : part.sub_(packed.narrow(0, begin, count));
      });
    } else {
      noteSigns(i, ofWholeTensors(bucket(i), nonnegative(difference, before_[i])));
      difference = change(difference, before_[i]);
    }
    deferred_[i] = deferred_[i].defined() ? deferred_[i].add_(difference) : difference;
  }
}

void GroupSynchronizer::noteSigns(std::size_t index, at::Tensor nonnegative) {
  deferred_signs_.resize(bucketCount());
  at::Tensor& signs = deferred_signs_[index];
  signs = signs.defined() ? signs.logical_and_(nonnegative) : std::move(nonnegative);
}

void GroupSynchronizer::applyDeferred(bool heed_writes) {
  if (deferred_.empty()) {
    return;
  }
  at::NoGradGuard no_grad;
  const std::vector<Write> writes =
      heed_writes ? tensors_.endRound() : std::vector<Write>(tensors_.tensors().size(), Write::kNone);
  for (std::size_t i = 0; i < bucketCount(); ++i) {
    if (!deferred_[i].defined()) {
      continue;
    }
    if (i < parameters_.size()) {
      eachTensor(bucket(i), [&](std::size_t position, std::int64_t begin, std::int64_t count) {
        if (writes[position] == Write::kNow) {
          deferred_[i].narrow(0, begin, count).zero_();
        }
      });
    }
    bucket(i).pack();
    const at::Tensor& transfer_buffer = bucket(i).transfer_buffer;
    if (i < parameters_.size()) {
      transfer_buffer.add_(deferred_[i]);
    } else {
      transfer_buffer.copy_(keepSign(transfer_buffer.add(deferred_[i]), transfer_buffer, deferred_signs_[i]));
    }
    bucket(i).unpack(1.0);
  }
  deferred_.clear();
  deferred_signs_.clear();
}

// cta: what a forward will change while its average is on its way.
void GroupSynchronizer::snapshotBuffers() {
  before_.resize(bucketCount());
  for (std::size_t i = parameters_.size(); i < bucketCount(); ++i) {
    bucket(i).pack();
    before_[i] = bucket(i).transfer_buffer.clone();
  }
}

// cta: what the user may change of packed parameters.
void GroupSynchronizer::keep(std::size_t index) {
  const std::vector<std::size_t>& positions = bucket(index).positions;
  const bool needed = std::any_of(positions.begin(), positions.end(),
                                  [this](std::size_t position) { return tensors_.mayBeWritten(position); });
  before_[index] = needed ? bucket(index).transfer_buffer.clone() : at::Tensor();
}

void GroupSynchronizer::pause(WaitingFor what) {
  const std::lock_guard<std::mutex> lock(state_);
  source_->pause(what, [this](const AssignedGroup& group) {
    tensors_.note();
    if (combine_then_adapt_) {
      snapshotBuffers();
    }
    averageNow(group);
    applyPending();
  });
}

void GroupSynchronizer::synchronize() {
  checkAttached();
  tensors_.takeBack(group_->getBackendName());
  meet([this] { noteDistance(average_.form()); });
}

void GroupSynchronizer::enterAverage() {
  checkAttached();
  average_.checkNotEntered();
  tensors_.takeBack(group_->getBackendName());
  meet([this] { noteDistance(average_.enter()); });
}

void GroupSynchronizer::leaveAverage() { average_.leave(); }

void GroupSynchronizer::noteDistance(double distance) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.consensus_distance = distance;
}

}  // namespace torchext
