#include "ddp/averaging/group_reducer.h"

#include <cmath>

#include "ddp/common/buffer_mean.h"

namespace torchext {
namespace {

// Every bucket of every group is a call of its own.
std::uint64_t callId(const AssignedGroup& group, std::size_t bucket) {
  return group.id * GroupReducer::kMaxBuckets + bucket;
}

}  // namespace

void GroupReducer::addUp(std::size_t index, const AssignedGroup& group) {
  const at::Tensor& transfer_buffer = buckets_[index].transfer_buffer;
  const auto members = static_cast<std::int64_t>(group.members.size());
  if (buckets_.ofBuffers(index)) {
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

// Of parameters the sum is left, as the scale is applied where the result is copied back, in the same pass; but of
// float16 and of buffers the mean.
double GroupReducer::scaleOf(std::size_t index, std::int64_t members) const {
  const bool summed = !buckets_.ofBuffers(index) && buckets_[index].transfer_buffer.scalar_type() != at::kHalf;
  return summed ? 1.0 / static_cast<double>(members) : 1.0;
}

at::Tensor GroupReducer::meanOf(std::size_t index, std::int64_t members) const {
  const at::Tensor& transfer_buffer = buckets_[index].transfer_buffer;
  const double scale = scaleOf(index, members);
  return scale < 1.0 ? transfer_buffer.mul(scale) : transfer_buffer.clone();
}

void GroupReducer::finished(const AssignedGroup& group) {
  stats_.count([&](AveragingStats& stats) {
    ++stats.averages;
    ++stats.group_sizes[static_cast<std::int64_t>(group.members.size())];
    stats.bytes_sent = static_cast<std::int64_t>(partial_->bytesSent());
    stats.bytes_shared = static_cast<std::int64_t>(partial_->bytesShared());
  });
}

}  // namespace torchext
