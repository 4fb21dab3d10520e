#include "ddp/dear/sharded_form.h"

#include <utility>

#include <c10/util/Exception.h>

namespace torchext {

ShardedForm::ShardedForm(const ProcessGroupDear& group, const std::vector<at::Tensor>& parameters,
                         const std::vector<std::string>& names, const DearPlan& plan, const BackwardPass& pass,
                         LocalGradients& local, BucketExchanges& exchanges)
    : health_(group.health()),
      rank_(group.getRank()),
      world_size_(group.getSize()),
      parameters_(parameters),
      names_(names),
      plan_(plan),
      pass_(pass),
      local_(local),
      exchanges_(exchanges) {}

at::Tensor ShardedForm::stepped(std::size_t parameter) const {
  return ownSlice(parameters_.at(parameter), world_size_, rank_);
}

at::Tensor ShardedForm::ownSliceOf(std::size_t parameter, const at::Tensor& whole) const {
  const at::Tensor& like = parameters_.at(parameter);
  TORCH_CHECK(whole.sizes() == like.sizes(), "dear: ", names_[parameter], " has shape ", like.sizes(),
              ", what is to be cut has ", whole.sizes());
  const at::Tensor ordered = sameMemoryOrder(whole, like) ? whole : at::empty_like(like).copy_(whole);
  return ownSlice(ordered, world_size_, rank_);
}

std::optional<at::Tensor> ShardedForm::ownGradient(std::size_t parameter) {
  TORCH_CHECK(!plan_.allreduce,
              "dear: this model trains as plain DDP at the moment; its gradients are the parameters' own");
  if (!pass_.complete()) {
    return std::nullopt;
  }
  exchanges_.checkNotEnded();
  const std::optional<std::size_t> bucket = exchanges_.bucketOf(parameter);
  if (!bucket) {
    return std::nullopt;
  }
  exchanges_.waitReduced(*bucket);
  exchanges_.checkNotEnded();
  const ShardBuckets& buckets = *exchanges_.buckets();
  return buckets.hasGradient(parameter) ? std::optional(buckets.gradient(parameter)) : std::nullopt;
}

std::size_t ShardedForm::arrivedBuckets(std::size_t known) {
  // Otherwise nothing is on its way.
  return pass_.complete() ? exchanges_.waitReducedBeyond(known) : exchanges_.bucketCount();
}

// A pass that adds to gradients that are still being sent waits for them.
void ShardedForm::beforeAccumulation(std::size_t parameter) {
  checkNotLost(parameter);
  const std::optional<std::size_t> bucket = exchanges_.bucketOf(parameter);
  if (!pass_.complete() || !bucket) {
    return;
  }
  exchanges_.waitReduced(*bucket, BucketExchanges::Exposed::kNothing);
  if (on_accumulating_ && !std::exchange(accumulating_, true)) {
    on_accumulating_();
  }
}

// With what a script has done to averaged gradients before a step, the parameters' own are not in accord. Those of
// another rank may be zero or none, and are then what they would be: it goes on and waits for this rank's, or is told.
void ShardedForm::checkNotLost(std::size_t parameter) {
  if (lost_.empty() || lost_[parameter] == nullptr) {
    return;
  }
  const at::Tensor& own = parameters_[parameter].grad();
  if (own.defined() && own.data_ptr() == lost_[parameter] && own.any().item<bool>()) {
    const std::string text =
        c10::str("the gradient of ", names_[parameter],
                 " was changed before the last step and is added to after it, where that change is lost; call "
                 "optimizer.zero_grad() after each step, or take DeAROptions(form='replicated')");
    health_->poison(rank_, text);
    TORCH_CHECK(false, "dear: ", text);
  }
  lost_[parameter] = nullptr;
}

void ShardedForm::afterStep() {
  local_.noteAll();  // under plain all-reduce, too: a script must not fail only once that is over
  lost_ = std::exchange(lost_change_, false) ? local_.memory() : std::vector<const void*>();
  if (exchanges_.buckets() != nullptr) {
    gatherParameters();  // whatever was stepped with: the other ranks gather theirs
  }
}

void ShardedForm::gatherParameters() {
  exchanges_.gatherAll([this](std::size_t bucket) -> BucketExchanges::Gather {
    return {[this, bucket] { exchanges_.buckets()->packParameters(bucket); },
            [this, bucket] { exchanges_.buckets()->unpackParameters(bucket); }};
  });
}

}  // namespace torchext
