// What DearSynchronizer sends: reduce-scatters as gradients come, all-gathers after the step.
#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include "core/base/check.h"
#include "ddp/dear/dear_synchronizer.h"

namespace torchext {
namespace {

// For the flight recorder: whole buffers, and of what size a rank's own chunk of each is.
std::vector<at::Tensor> buffersOf(const ShardBuckets& buckets) {
  std::vector<at::Tensor> buffers;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    buffers.push_back(buckets.buffer(b));
  }
  return buffers;
}

std::vector<at::Tensor> chunksOf(const ShardBuckets& buckets, int world_size) {
  std::vector<at::Tensor> chunks = buffersOf(buckets);
  for (at::Tensor& chunk : chunks) {
    chunk = chunk.narrow(0, 0, chunk.numel() / world_size);
  }
  return chunks;
}

}  // namespace

void DearSynchronizer::expectBackward(bool exchanges) {
  armed_ = exchanges && !detached_ && !inForkedChild();
  end_queued_ = false;  // a backward pass that raised has had no end
  if (armed_ && buckets_ && unstepped_) {
    // Kept, they are what this pass adds to while they are being sent; dropped (clearGradients), their arrival would be
    // taken for that of this pass.
    waitExchanges();
    unstepped_ = false;
  }
  started_ = started_ && !armed_;
  // A forward pass may have no backward pass: then the next has its record.
  if (armed_ && buckets_ && !reduction_.open()) {
    reduction_ = group_->flights().begin("reduce", "reduce_scatter_tensor_coalesced", buffersOf(*buckets_),
                                         chunksOf(*buckets_, group_->getSize()));
  }
}

// Autograd runs what is queued at the end of the pass that queues it, and a reentrant activation checkpoint is a pass
// of its own inside: the first gradient may come from there. So whoever knows the outer pass queues the end before.
void DearSynchronizer::queueEnd() {
  if (std::exchange(end_queued_, true)) {
    return;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([this] {
    end_queued_ = false;
    if (armed_ && started_) {  // else it was of no parameters (torch.autograd.grad), or of no_sync()
      if (buckets_) {
        backwardEnds();
      } else {
        armed_ = false;  // DDP's reducer averages no further pass of this forward pass, either
        std::fill(local_.begin(), local_.end(), nullptr);
      }
    }
  });
}

void DearSynchronizer::beginBackward() {
  started_ = true;
  complete_ = gathered_ = accumulating_ = false;
  whole_.assign(parameters_.size(), at::Tensor());
  next_bucket_ = 0;
  gradient_order_.clear();
  std::fill(gradients_.begin(), gradients_.end(), at::Tensor());
  std::fill(seen_.begin(), seen_.end(), 0);
  for (std::size_t b = 0; b < missing_.size(); ++b) {
    missing_[b] = buckets_->tensorsOf(b).size();
  }
  queueEnd();
}

// A parameter's own, or none.
at::Tensor DearSynchronizer::denseGradient(std::size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  TORCH_CHECK_TYPE(!gradient.defined() || gradient.layout() == at::kStrided, "dear: parameter ", names_[parameter],
                   " has a ", gradient.layout(), " gradient; make it dense (nn.Embedding(sparse=False))");
  return gradient;
}

void DearSynchronizer::gradientReady(std::size_t parameter) {
  if (!armed_) {
    local_[parameter] =
        parameters_[parameter].grad().layout() == at::kStrided ? parameters_[parameter].grad().data_ptr() : nullptr;
    return;
  }
  local_[parameter] = nullptr;
  const at::Tensor gradient = denseGradient(parameter);
  if (!started_) {
    beginBackward();
  }
  gradient_order_.push_back(static_cast<std::int64_t>(parameter));
  if (!buckets_) {
    return;
  }
  const std::size_t bucket = buckets_->bucketOf(parameter);
  TORCH_CHECK(waited_[parameter], "dear: parameter ", names_[parameter],
              " was used in a forward pass that did not wait for it (its module was not called, and had been in the "
              "first forward pass); call sync.wait() before such a forward pass");
  TORCH_CHECK(bucket >= next_bucket_, "dear: parameter ", names_[parameter],
              " got its gradient twice in one backward pass, the first one is on its way already; use activation "
              "checkpointing with use_reentrant=False");
  gradients_[parameter] = gradient;
  if (std::exchange(seen_[parameter], 1) == 0 && --missing_[bucket] == 0) {
    postReady();
  }
}

// Called by autograd when everything else of the backward pass is over.
void DearSynchronizer::backwardEnds() {
  armed_ = false;
  for (std::size_t b = next_bucket_; b < buckets_->size(); ++b) {
    for (const std::int64_t tensor : buckets_->tensorsOf(b)) {
      const std::size_t parameter = core::index(tensor);
      if (seen_[parameter] == 0) {
        if (!unused_allowed_ && parameters_[parameter].requires_grad()) {
          throwMissing();
        }
        gradients_[parameter] = denseGradient(parameter);  // of earlier micro-batches, or none
      }
    }
    missing_[b] = 0;
  }
  postReady();
  complete_ = true;
  std::fill(local_.begin(), local_.end(), nullptr);
  noteVersions();
  if (replicated_) {
    std::fill(settled_.begin(), settled_.end(), 0);
    postGradientGathers();
  }
  if (on_reduced_) {
    on_reduced_();
  }
}

void DearSynchronizer::noteVersions() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    versions_[i] = {gradient.defined() ? gradient.data_ptr() : nullptr, gradient.defined() ? gradient._version() : 0};
  }
}

void DearSynchronizer::postReady() {
  while (next_bucket_ < missing_.size() && missing_[next_bucket_] == 0) {
    postReduceScatter(next_bucket_++);
  }
}

void DearSynchronizer::postReduceScatter(std::size_t bucket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    reducing_[bucket] = 1;
  }
  unstepped_ = true;
  std::vector<at::Tensor> gradients;
  for (const std::int64_t tensor : buckets_->tensorsOf(bucket)) {
    gradients.push_back(std::move(gradients_[core::index(tensor)]));
  }
  // Exchanges are run in the order posted: when the last bucket arrives, all have.
  FlightRecord record = bucket + 1 == buckets_->size() ? std::exchange(reduction_, {}) : FlightRecord();
  exchange_->post({ExchangeTask::Kind::kReduceScatter,
                   transfers_->reduceScatter(buckets_->buffer(bucket), buckets_->meanScale(bucket)),
                   [this, bucket, gradients = std::move(gradients)] { buckets_->packGradients(bucket, gradients); },
                   [this, bucket] { buckets_->readMarks(bucket); },
                   [this, bucket, record]() mutable {
                     record.done();
                     {
                       std::lock_guard<std::mutex> lock(mutex_);
                       reducing_[bucket] = 0;
                     }
                     changed_.notify_all();
                   }});
}

void DearSynchronizer::expectGathers() {
  const FlightRecord record = group_->flights().begin("gather", "all_gather_into_tensor_coalesced",
                                                      chunksOf(*buckets_, group_->getSize()), buffersOf(*buckets_));
  std::lock_guard<std::mutex> lock(mutex_);
  gather_record_ = record;
  std::fill(gathering_.begin(), gathering_.end(), 1);
  gathering_count_ = static_cast<int>(gathering_.size());
}

void DearSynchronizer::gatherArrived(std::size_t bucket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gathering_[bucket] = 0;
    if (--gathering_count_ == 0) {
      gather_record_.done();
    }
  }
  changed_.notify_all();
}

void DearSynchronizer::postParameterGathers() {
  expectGathers();
  for (const std::size_t bucket : gather_order_) {
    exchange_->post({ExchangeTask::Kind::kAllGather, transfers_->allGather(buckets_->buffer(bucket)),
                     [this, bucket] { buckets_->packParameters(bucket); },
                     [this, bucket] { buckets_->unpackParameters(bucket); },
                     [this, bucket] { gatherArrived(bucket); }});
  }
}

// The own slices are in the staging buffers already. What is gathered takes the place of the local gradients.
void DearSynchronizer::postGradientGathers() {
  gathered_ = true;
  expectGathers();
  for (const std::size_t bucket : gather_order_) {
    std::vector<at::Tensor> locals;
    for (const std::int64_t tensor : buckets_->tensorsOf(bucket)) {
      locals.push_back(parameters_[core::index(tensor)].grad());
    }
    exchange_->post({ExchangeTask::Kind::kAllGather, transfers_->allGather(buckets_->buffer(bucket)), nullptr,
                     [this, bucket, locals = std::move(locals)] { takeWhole(bucket, locals); },
                     [this, bucket] { gatherArrived(bucket); }});
  }
}

// locals: of the bucket's tensors, undefined where this rank has none.
void DearSynchronizer::takeWhole(std::size_t bucket, const std::vector<at::Tensor>& locals) {
  std::vector<at::Tensor> targets(locals.size());
  for (std::size_t i = 0; i < locals.size(); ++i) {
    const std::size_t parameter = core::index(buckets_->tensorsOf(bucket)[i]);
    if (buckets_->hasGradient(parameter)) {
      const at::Tensor& like = parameters_[parameter];
      const bool usable = locals[i].defined() && sameMemoryOrder(locals[i], like);
      // With a version of its own: it tells what a script does to the parameter's gradient.
      targets[i] = whole_[parameter] = usable ? locals[i].variable_data() : at::empty_like(like);
    }
  }
  buckets_->unpackGradients(bucket, targets);
}

}  // namespace torchext
