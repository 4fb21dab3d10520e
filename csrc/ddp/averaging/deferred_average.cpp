#include "ddp/averaging/deferred_average.h"

#include <cstdint>

#include <ATen/core/grad_mode.h>

#include "ddp/common/buffer_mean.h"

namespace torchext {

void DeferredAverage::average(const AssignedGroup& group) {
  const auto members = static_cast<std::int64_t>(group.members.size());
  if (members < 2) {
    return;
  }
  if (differences_.empty()) {
    tensors_.note();
    differences_.resize(buckets_.size());
  }
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const FlatBucket& bucket = buckets_[i];
    bucket.pack();
    const at::Tensor local = bucket.transfer_buffer.clone();
    if (differences_[i].defined()) {
      bucket.transfer_buffer.add_(differences_[i]);
    }
    reducer_.addUp(i, group);
    const at::Tensor mean = reducer_.meanOf(i, members);
    if (buckets_.ofBuffers(i)) {
      differences_[i] = change(mean, local);
      noteSigns(i, ofWholeTensors(bucket, nonnegative(mean, local)));
    } else {
      differences_[i] = mean.sub(local);
    }
  }
  reducer_.finished(group);
}

void DeferredAverage::add(std::size_t index, const at::Tensor& difference, const at::Tensor& nonnegative) {
  differences_.resize(buckets_.size());
  at::Tensor& sum = differences_[index];
  sum = sum.defined() ? sum.add_(difference) : difference;
  if (buckets_.ofBuffers(index)) {
    noteSigns(index, nonnegative);
  }
}

void DeferredAverage::noteSigns(std::size_t index, const at::Tensor& nonnegative) {
  signs_.resize(buckets_.size());
  at::Tensor& signs = signs_[index];
  signs = signs.defined() ? signs.logical_and_(nonnegative) : nonnegative;
}

void DeferredAverage::apply(bool heed_writes) {
  if (differences_.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const std::vector<Write> writes =
      heed_writes ? tensors_.endRound() : std::vector<Write>(tensors_.tensors().size(), Write::kNone);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const at::Tensor& difference = differences_[i];
    if (!difference.defined()) {
      continue;
    }
    const FlatBucket& bucket = buckets_[i];
    if (!buckets_.ofBuffers(i)) {
      eachTensor(bucket, [&](std::size_t position, std::int64_t begin, std::int64_t count) {
        if (writes[position] == Write::kNow) {
          difference.narrow(0, begin, count).zero_();
        }
      });
    }
    bucket.pack();
    const at::Tensor& transfer_buffer = bucket.transfer_buffer;
    if (buckets_.ofBuffers(i)) {
      transfer_buffer.copy_(keepSign(transfer_buffer.add(difference), transfer_buffer, signs_[i]));
    } else {
      transfer_buffer.add_(difference);
    }
    bucket.unpack(1.0);
  }
  differences_.clear();
  signs_.clear();
}

}  // namespace torchext
