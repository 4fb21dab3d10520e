#include "ddp/dear/bucket_exchanges.h"

#include <algorithm>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "c10d/backend/shard_rooms.h"
#include "c10d/fault/explain_error.h"
#include "c10d/transport/shard_collectives.h"
#include "c10d/transport/shard_exchange.h"
#include "core/base/check.h"

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

std::unique_ptr<ShardExchange> exchangeOf(ProcessGroupDear& group, int channel, bool hierarchical) {
  const PointToPoint transport = group.dataTransport();
  if (!hierarchical) {
    return std::make_unique<ShardExchange>(transport, channel);
  }
  const core::RankGrid grid = core::roomGrid(roomsOf(transport, group));
  if (grid.sides.size() == 1 && group.getRank() == 0) {
    LOG(WARNING) << "dear: transport is hierarchical, and there are no rooms of equal size: one ring in their order";
  }
  return std::make_unique<ShardExchange>(transport, channel, ShardTuning(), grid);
}

}  // namespace

BucketExchanges::BucketExchanges(c10::intrusive_ptr<ProcessGroupDear> group, const std::vector<at::Tensor>& parameters,
                                 bool hierarchical, const MakeDedicatedGroup& make_dedicated_group)
    : group_(std::move(group)), parameters_(parameters), channel_(group_->nextChannel()) {
  if (make_dedicated_group) {
    dedicated_group_ = make_dedicated_group();
    transfers_ = std::make_unique<ShardCollectives>(dedicated_group_);
    failure_callback_ =
        group_->health()->onFailure().add([dedicated_group = dedicated_group_, health = group_->health()] {
          const auto [rank, reason] = health->reason().get();
          dedicated_group->abortBecauseOf(rank, reason);
        });
  } else {
    transfers_ = exchangeOf(*group_, channel_, hierarchical);
  }
  const c10::Device device = parameters_.empty() ? c10::Device(c10::kCPU) : parameters_.front().device();
  exchange_ = std::make_shared<ExchangeThread>(device, [this](const std::exception_ptr& error) { fail(error); });
}

void BucketExchanges::rebuild(const DearPlan& plan) {
  buckets_ = nullptr;  // first: two sets of buffers would be too many
  if (!plan.allreduce && !plan.gradient_order.empty()) {
    buckets_ = std::make_unique<ShardBuckets>(parameters_, plan.gradient_order, plan.bucket_bytes, plan.ends,
                                              group_->getRank(), group_->getSize());
  }
  gather_order_.clear();
  const std::size_t count = buckets_ ? buckets_->size() : 0;
  std::vector<std::size_t> bucket_of(parameters_.size(), BucketArrivals::kNone);
  std::vector<char> listed(count, 0);
  for (const std::int64_t tensor : plan.forward_order) {
    if (const std::optional<std::size_t> bucket = bucketOf(core::index(tensor))) {
      bucket_of[core::index(tensor)] = *bucket;
      if (!std::exchange(listed[*bucket], 1)) {
        gather_order_.push_back(*bucket);
      }
    }
  }
  arrivals_.reset(count, std::move(bucket_of));
}

std::optional<std::size_t> BucketExchanges::bucketOf(std::size_t parameter) const {
  return buckets_ && buckets_->holds(parameter) ? std::optional(buckets_->bucketOf(parameter)) : std::nullopt;
}

// ---- Sending ----

void BucketExchanges::expectReduction() {
  // A forward pass may have no backward pass: then the next has its record.
  if (!reduction_.open()) {
    reduction_ = group_->flights().begin("reduce", "reduce_scatter_tensor_coalesced", buffersOf(*buckets_),
                                         chunksOf(*buckets_, group_->getSize()));
  }
}

void BucketExchanges::reduceScatter(std::size_t bucket, std::vector<at::Tensor> gradients) {
  arrivals_.reducePosted(bucket);
  unstepped_ = true;
  // Exchanges are run in the order posted: when the last bucket arrives, all have.
  FlightRecord record = bucket + 1 == buckets_->size() ? std::exchange(reduction_, {}) : FlightRecord();
  exchange_->post({ExchangeTask::Kind::kReduceScatter,
                   transfers_->reduceScatter(buckets_->buffer(bucket), buckets_->meanScale(bucket)),
                   [this, bucket, gradients = std::move(gradients)] { buckets_->packGradients(bucket, gradients); },
                   [this, bucket] { buckets_->readMarks(bucket); },
                   [this, bucket, record]() mutable {
                     record.done();
                     arrivals_.reduced(bucket);
                   }});
}

void BucketExchanges::gatherAll(const std::function<Gather(std::size_t bucket)>& gather) {
  const FlightRecord all = group_->flights().begin("gather", "all_gather_into_tensor_coalesced",
                                                   chunksOf(*buckets_, group_->getSize()), buffersOf(*buckets_));
  arrivals_.gathersPosted();
  for (const std::size_t bucket : gather_order_) {
    auto [pack, unpack] = gather(bucket);
    FlightRecord record = bucket == gather_order_.back() ? all : FlightRecord();
    exchange_->post({ExchangeTask::Kind::kAllGather, transfers_->allGather(buckets_->buffer(bucket)), std::move(pack),
                     std::move(unpack), [this, bucket, record]() mutable {
                       record.done();
                       arrivals_.gathered(bucket);
                     }});
  }
}

// ---- Waiting ----

// Ends: every wait of the exchanges has the group's timeout. A signal's handler may end the group in it, and with that
// the buckets.
void BucketExchanges::waitUntil(Exposed exposed, const BucketArrivals::Ready& ready) {
  group_->health()->checkProcess("training");
  if (arrivals_.check(ready)) {
    return;
  }
  RECORD_FUNCTION("torchext::dear::wait", std::vector<c10::IValue>{});
  // Who waits for all ranks meanwhile, in optimizer.state_dict() say, learns that this one does not come there.
  arrivals_.wait(exposed, ready, [this] { group_->tellStep(channel_, 0, begun()); });
}

void BucketExchanges::waitReduced(std::size_t bucket, Exposed exposed) {
  waitUntil(exposed, [bucket](const BucketArrivals::Posted& posted) { return posted.isReduced(bucket); });
}

std::size_t BucketExchanges::waitReducedBeyond(std::size_t known) {
  std::size_t reduced = 0;
  waitUntil(Exposed::kReduceScatter, [&](const BucketArrivals::Posted& posted) {
    reduced = posted.reducedInOrder();
    return reduced > known || reduced == bucketCount();
  });
  return reduced;
}

void BucketExchanges::waitGathered(at::IntArrayRef tensors) {
  waitUntil(Exposed::kAllGather, [tensors](const BucketArrivals::Posted& posted) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](std::int64_t tensor) { return posted.isGathered(core::index(tensor)); });
  });
}

void BucketExchanges::waitAllGathered() {
  waitUntil(Exposed::kAllGather, [](const BucketArrivals::Posted& posted) { return posted.allGathered(); });
}

void BucketExchanges::waitIdle() {
  // Each wait of an exchange has the group's timeout; one may just have begun, and the next behind it.
  const std::shared_ptr<ExchangeThread> exchange = exchange_;
  if (!exchange || exchange->waitIdle(2 * group_->timeout())) {
    return;
  }
  arrivals_.rethrow();
  const std::string text = "no exchange ended within twice the group's timeout";
  group_->health()->poison(group_->getRank(), text);
  C10_THROW_ERROR(DistBackendError, c10::str(group_->health()->label(), ": ", text));
}

// ---- Steps ----

void BucketExchanges::noteStep(bool with_gradients) {
  ++stepped_;
  unstepped_ = unstepped_ && !with_gradients;
}

void BucketExchanges::finishUnstepped() {
  if (unstepped_) {
    waitIdle();
    unstepped_ = false;
  }
}

bool BucketExchanges::othersTrainOn() const { return group_->furthestStep(channel_, 0) > begun(); }

// ---- The end ----

void BucketExchanges::fail(const std::exception_ptr& error) {
  // A broken connection becomes the error that names who died; the others learn of any other.
  arrivals_.fail(explainToAll(*group_->health(), error, OpInfo{.name = "training"}));
}

bool BucketExchanges::finishSending(std::chrono::milliseconds limit) {
  if (!exchange_) {
    return false;
  }
  const auto sent = [this](std::chrono::milliseconds within) {
    return arrivals_.failed() || exchange_->waitIdleFor(within);
  };
  if (!sent(limit) && limit.count() > 0 && !group_->outwaitTraining(sent)) {
    LOG(WARNING) << "dear [rank " << group_->getRank() << "]: leaving while parameters are on their way";
    group_->abortWithReason(c10::str("rank ", group_->getRank(), " left while parameters were on their way"));
  }
  ended_ = true;
  return true;
}

void BucketExchanges::end() {
  if (dedicated_group_) {
    group_->health()->onFailure().remove(failure_callback_);
  }
  exchange_->discard();
  if (!arrivals_.failed() && arrivals_.anyPosted()) {
    fail(group_->health()->failureOf({.name = "training"}));  // dropped: who waits for it is told
  }
  addTo(last_);
  std::lock_guard<std::mutex> lock(end_mutex_);
  exchange_ = nullptr;
  // Holds an inner group, which must end with the process group.
  transfers_ = nullptr;
  dedicated_group_ = nullptr;
  buckets_ = nullptr;
}

void BucketExchanges::checkNotEnded() const {
  if (!ended_) {
    return;
  }
  arrivals_.rethrow();
  C10_THROW_ERROR(DistBackendError,
                  c10::str(group_->health()->label(), ": the averaged gradients ended with the ",
                           "process group; call optimizer.step() before it is destroyed, or before ", "sync.detach()"));
}

// ---- Stats ----

void BucketExchanges::addTo(DearStats& stats) const {
  stats.exposed_rs_ms = arrivals_.exposedMilliseconds(Exposed::kReduceScatter);
  stats.exposed_ag_ms = arrivals_.exposedMilliseconds(Exposed::kAllGather);
  std::lock_guard<std::mutex> lock(end_mutex_);
  if (!exchange_) {
    stats.rs_ms = last_.rs_ms;
    stats.ag_ms = last_.ag_ms;
    stats.bytes_sent = last_.bytes_sent;
    return;
  }
  stats.rs_ms = exchange_->busyMilliseconds(ExchangeTask::Kind::kReduceScatter);
  stats.ag_ms = exchange_->busyMilliseconds(ExchangeTask::Kind::kAllGather);
  stats.bytes_sent = static_cast<std::int64_t>(transfers_->bytesSent());
  for (std::size_t b = 0; buckets_ && b < buckets_->size(); ++b) {
    stats.buckets.push_back(static_cast<std::int64_t>(buckets_->bytesOf(b)));
  }
  stats.staging_bytes = buckets_ ? static_cast<std::int64_t>(buckets_->stagingBytes()) : 0;
}

}  // namespace torchext
