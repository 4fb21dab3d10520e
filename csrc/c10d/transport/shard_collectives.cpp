#include "c10d/transport/shard_collectives.h"

#include <optional>
#include <utility>

#include <c10/util/Exception.h>

#include "c10d/threads/outstanding_averages.h"

namespace torchext {

class ShardCollectives::Operation : public ShardOperation {
 public:
  // scale: of a reduce-scatter; an all-gather has none.
  Operation(ShardCollectives& owner, const at::Tensor& buffer, std::optional<double> scale)
      : owner_(owner), buffer_(buffer), scale_(scale) {
    const std::int64_t size = owner.group_->getSize();
    TORCH_INTERNAL_ASSERT(buffer.is_contiguous() && buffer.numel() % size == 0);
    const std::int64_t chunk = buffer.numel() / size;
    own_ = buffer.narrow(0, owner.group_->getRank() * chunk, chunk);
  }

  // In place, as NCCL has it: the own chunk lies where it belongs in the buffer.
  void begin() override {
    const InternalCollective internal;
    at::Tensor own = own_;
    at::Tensor all = buffer_;
    work_ = scale_ ? owner_.group_->_reduce_scatter_base(own, all, c10d::ReduceScatterOptions())
                   : owner_.group_->_allgather_base(all, own, c10d::AllgatherOptions());
    owner_.bytes_sent_ += buffer_.nbytes() - own_.nbytes();
  }

  void finish(const std::function<void()>& posted) override {
    posted();
    work_->wait();
    if (scale_ && *scale_ != 1.0) {
      own_.mul_(*scale_);
    }
  }

  void drain() override { work_ = nullptr; }

 private:
  ShardCollectives& owner_;
  at::Tensor buffer_;
  at::Tensor own_;
  std::optional<double> scale_;
  c10::intrusive_ptr<c10d::Work> work_;
};

std::unique_ptr<ShardOperation> ShardCollectives::reduceScatter(const at::Tensor& buffer, double scale) {
  return std::make_unique<Operation>(*this, buffer, scale);
}

std::unique_ptr<ShardOperation> ShardCollectives::allGather(const at::Tensor& buffer) {
  return std::make_unique<Operation>(*this, buffer, std::nullopt);
}

}  // namespace torchext
