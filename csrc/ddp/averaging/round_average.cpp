#include "ddp/averaging/round_average.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "c10d/fault/fault_points.h"
#include "ddp/common/buffer_mean.h"
#include "ddp/common/elapsed.h"

namespace torchext {

void RoundAverage::begin() {
  tensors_.note();
  if (!combine_then_adapt_) {
    return;
  }
  before_.resize(buckets_.size());
  for (std::size_t i = buckets_.parameters().size(); i < buckets_.size(); ++i) {
    buckets_[i].pack();
    before_[i] = buckets_[i].transfer_buffer.clone();
  }
}

void RoundAverage::average(const AssignedGroup& group) {
  if (group.members.size() < 2) {
    return;
  }
  RECORD_FUNCTION("torchext::average", std::vector<c10::IValue>{});
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    averageBucket(i, group);
  }
  reducer_.finished(group);
  if (combine_then_adapt_) {
    waiting_members_ = static_cast<std::int64_t>(group.members.size());
  }
}

void RoundAverage::averageBucket(std::size_t index, const AssignedGroup& group) {
  const FlatBucket& bucket = buckets_[index];
  const auto start = Clock::now();
  if (combine_then_adapt_) {
    packToKeep(index);
  } else {
    bucket.pack();
  }
  const auto packed = Clock::now();
  const double peers_before = reducer_.peerSeconds();
  faultPoint(FaultPoint::kAveragePacked);
  reducer_.addUp(index, group);
  faultPoint(FaultPoint::kAverageReduced);
  const auto reduced = Clock::now();
  if (!combine_then_adapt_) {
    bucket.unpack(reducer_.scaleOf(index, static_cast<std::int64_t>(group.members.size())));
    if (index + 1 < buckets_.size()) {
      pending_.release(index);
    }
  }
  const double peer_ms = 1e3 * (reducer_.peerSeconds() - peers_before);
  stats_.count([&](AveragingStats& stats) {
    stats.copy_ms += millisecondsSince(start) - milliseconds(reduced - packed);
    stats.peer_wait_ms += peer_ms;
    stats.transfer_ms += milliseconds(reduced - packed) - peer_ms;
  });
}

// cta. Of parameters what the user may change meanwhile is kept; of buffers begin() has.
void RoundAverage::packToKeep(std::size_t index) {
  const FlatBucket& bucket = buckets_[index];
  if (buckets_.ofBuffers(index)) {
    bucket.transfer_buffer.copy_(before_[index]);  // from before the forward could change them
    return;
  }
  bucket.pack();
  const bool needed = std::any_of(bucket.positions.begin(), bucket.positions.end(),
                                  [this](std::size_t position) { return tensors_.mayBeWritten(position); });
  before_[index] = needed ? bucket.transfer_buffer.clone() : at::Tensor();
}

void RoundAverage::apply() {
  const std::int64_t members = std::exchange(waiting_members_, 0);
  if (members == 0) {
    return;
  }
  RECORD_FUNCTION("torchext::apply", std::vector<c10::IValue>{});
  const at::NoGradGuard no_grad;
  const std::vector<Write> writes = tensors_.endRound();
  const auto written = [&writes](std::size_t position) { return writes[position] != Write::kNone; };
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const std::vector<std::size_t>& positions = buckets_[i].positions;
    if (buckets_.ofBuffers(i) || std::any_of(positions.begin(), positions.end(), written)) {
      applyCorrected(i, reducer_.meanOf(i, members), writes);
    } else {
      buckets_[i].unpack(reducer_.scaleOf(i, members));
    }
  }
}

void RoundAverage::applyCorrected(std::size_t index, const at::Tensor& mean, const std::vector<Write>& writes) {
  const FlatBucket& bucket = buckets_[index];
  const at::Tensor& now = bucket.transfer_buffer;
  bucket.pack();
  if (buckets_.ofBuffers(index)) {
    const at::Tensor moved = carry(mean, now, before_[index]);
    now.copy_(keepSign(moved, now, ofWholeTensors(bucket, nonnegative(mean, before_[index]))));
  } else {
    eachTensor(bucket, [&](std::size_t position, std::int64_t begin, std::int64_t count) {
      const at::Tensor part = now.narrow(0, begin, count);
      if (writes[position] == Write::kNone) {
        part.copy_(mean.narrow(0, begin, count));
      } else if (writes[position] == Write::kAgain) {
        part.copy_(carry(mean.narrow(0, begin, count), part, before_[index].narrow(0, begin, count)));
      }
    });
  }
  bucket.unpack(1.0);
}

void RoundAverage::defer(DeferredAverage& deferred) {
  const std::int64_t members = std::exchange(waiting_members_, 0);
  if (members == 0) {
    return;
  }
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const at::Tensor mean = reducer_.meanOf(i, members);
    if (buckets_.ofBuffers(i)) {
      deferred.add(i, change(mean, before_[i]), ofWholeTensors(buckets_[i], nonnegative(mean, before_[i])));
    } else {
      deferred.add(i, differenceOf(i, mean), at::Tensor());
    }
  }
}

// Of parameters, in the memory of their mean.
at::Tensor RoundAverage::differenceOf(std::size_t index, const at::Tensor& mean) const {
  const FlatBucket& bucket = buckets_[index];
  bucket.pack();
  eachTensor(bucket, [&](std::size_t position, std::int64_t begin, std::int64_t count) {
    const at::Tensor part = mean.narrow(0, begin, count);
    const Write write = tensors_.write(position);
    if (write == Write::kNow) {
      part.zero_();
    } else {
      const at::Tensor& packed = write == Write::kAgain ? before_[index] : bucket.transfer_buffer;
      part.sub_(packed.narrow(0, begin, count));
    }
  });
  return mean;
}

}  // namespace torchext
