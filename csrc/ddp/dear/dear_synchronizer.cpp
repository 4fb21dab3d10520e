#include "ddp/dear/dear_synchronizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "c10d/threads/interruptible_wait.h"
#include "c10d/threads/outstanding_averages.h"
#include "c10d/transport/shard_collectives.h"
#include "c10d/transport/shard_exchange.h"
#include "core/base/check.h"
#include "ddp/common/attach_agreement.h"
#include "ddp/common/elapsed.h"
#include "ddp/common/side_stream.h"

namespace torchext {
namespace {

std::size_t bytesOf(const std::vector<at::Tensor>& tensors) {
  std::size_t total = 0;
  for (const at::Tensor& tensor : tensors) {
    total += tensor.requires_grad() ? tensor.nbytes() : 0;
  }
  return total;
}

std::vector<std::int64_t> trainable(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> result;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].requires_grad()) {
      result.push_back(static_cast<std::int64_t>(i));
    }
  }
  return result;
}

}  // namespace

DearSynchronizer::DearSynchronizer(c10::intrusive_ptr<ProcessGroupDear> group, std::vector<at::Tensor> parameters,
                                   std::vector<std::string> names, bool unused_allowed, std::optional<double> bucket_mb,
                                   const MakeDedicatedGroup& make_dedicated_group)
    : group_(std::move(group)),
      parameters_(std::move(parameters)),
      names_(std::move(names)),
      replicated_(group_->dearOptions().form == "replicated"),
      unused_allowed_(unused_allowed),
      planner_(*group_, bytesOf(parameters_), trainable(parameters_),
               bucket_mb.value_or(group_->dearOptions().bucket_mb)),
      gradients_(parameters_.size()),
      seen_(parameters_.size(), 0),
      local_(parameters_.size(), nullptr),
      settled_(parameters_.size(), 1),
      waited_(parameters_.size(), 1),
      versions_(parameters_.size()) {
  const auto& options = group_->dearOptions();
  std::vector<std::string> described;
  described.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    described.push_back(names_[i] + (parameters_[i].requires_grad() ? "" : " (frozen)"));
    addresses_.push_back(parameters_[i].data_ptr());
  }
  const c10::Device device = parameters_.empty() ? c10::Device(c10::kCPU) : parameters_.front().device();
  const double bucket = bucket_mb.value_or(options.bucket_mb);
  agreeOnAttach(*group_, {agreementOf("parameters", parameters_, described),
                          {"type of device", c10::DeviceTypeName(device.type(), /*lower_case=*/true)},
                          {"transport by collectives", static_cast<bool>(make_dedicated_group)},
                          {"DeAROptions.form", options.form},
                          {"bucket_mb", bucket == 0 ? std::nullopt : std::optional(bucket)},
                          {"DeAROptions.allreduce_fallback", options.allreduce_fallback}});
  channel_ = group_->nextChannel();
  if (make_dedicated_group) {
    dedicated_group_ = make_dedicated_group();
    transfers_ = std::make_unique<ShardCollectives>(dedicated_group_);
    abort_callback_ =
        group_->health()->onFailure().add([dedicated_group = dedicated_group_, health = group_->health()] {
          const auto [rank, reason] = health->reason().get();
          dedicated_group->abortBecauseOf(rank, reason);
        });
  } else {
    transfers_ = std::make_unique<ShardExchange>(group_->dataTransport(), channel_);
  }
  exchange_ = std::make_shared<ExchangeThread>(device, [this](const std::exception_ptr& error) { fail(error); });
  rebuild();
  hooks_ = std::make_unique<GradientHooks>(
      parameters_, [this](std::size_t i) { beforeAccumulation(i); }, [this](std::size_t i) { gradientReady(i); });
  shutdown_callback_ = group_->addShutdownCallback([this] { leave(std::chrono::milliseconds(1500)); });
}

DearSynchronizer::~DearSynchronizer() { DearSynchronizer::leave(std::chrono::seconds(2)); }

void DearSynchronizer::rebuild() {
  const DearPlan& plan = planner_.plan();
  if (!buckets_) {
    armed_ = false;  // under all-reduce no pass ends what a forward pass has armed
  }
  buckets_ = nullptr;  // first: two sets of buffers would be too many
  if (!plan.allreduce && !plan.gradient_order.empty()) {
    buckets_ = std::make_unique<ShardBuckets>(parameters_, plan.gradient_order, plan.bucket_bytes, group_->getRank(),
                                              group_->getSize());
  }
  const std::size_t count = buckets_ ? buckets_->size() : 0;
  gather_order_.clear();
  std::vector<char> listed(count, 0);
  for (const std::int64_t tensor : plan.forward_order) {
    if (buckets_ && !std::exchange(listed[buckets_->bucketOf(core::index(tensor))], 1)) {
      gather_order_.push_back(buckets_->bucketOf(core::index(tensor)));
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  reducing_.assign(count, 0);
  gathering_.assign(count, 0);
  missing_.assign(count, 0);
}

// ---- Step ----

void DearSynchronizer::beforeStep() {
  group_->health()->checkProcess("training");
  if (!replicated_) {
    waitAll();  // replicated: gradients are gathered, and each is waited for by itself
  }
  checkVersions();
  checkAveraged();
}

std::vector<std::int64_t> DearSynchronizer::takeMoved() {
  std::vector<std::int64_t> moved;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].data_ptr() == addresses_[i]) {
      continue;
    }
    moved.push_back(static_cast<std::int64_t>(i));
    if (buckets_ && buckets_->holds(i)) {
      TORCH_CHECK(
          buckets_->follow(i, parameters_[i]), "dear: parameter ", names_[i], " has become ", parameters_[i].toString(),
          parameters_[i].sizes(), " since torchext.attach (model.to(), .data = ...); ",
          "it may be given other memory of the same shape, strides, dtype and device; change a model before it ",
          "is wrapped in DistributedDataParallel and attached");
    }
    addresses_[i] = parameters_[i].data_ptr();
  }
  return moved;
}

void DearSynchronizer::afterStep() {
  ++steps_;
  ++taken_;
  const bool stepped = std::exchange(complete_, false);
  started_ = false;
  unstepped_ = unstepped_ && !stepped;
  if (!replicated_) {
    noteLocal();  // under plain all-reduce, too: a script must not fail only once that is over
    lost_ = std::exchange(lost_change_, false) ? local_ : std::vector<const void*>();
  }
  // Before the planner, which may wait for rank 0: that may be waiting for gradients that it looks at.
  if (buckets_) {
    if (!replicated_) {
      postParameterGathers();  // whatever was stepped with: the other ranks post theirs
    }
    std::fill(waited_.begin(), waited_.end(), 0);
  }
  if (!planner_.decided() && !parameters_.empty()) {
    synchronizeDevice(parameters_.front().device());  // what is measured is a step, not how soon it was queued
  }
  const bool replan = planner_.afterStep(gradient_order_, forward_order_);
  forward_order_.clear();
  if (replan) {
    waitAll();
    waitExchanges();
    if (!detached_) {  // by a signal's handler
      rebuild();
    }
  }
}

// ---- Forward ----

// Milliseconds waited. Ends: every wait of the exchanges has the group's timeout. A signal's handler may end the group
// in it, and with that the buckets.
double DearSynchronizer::waitUntil(const char* what, const std::function<bool()>& ready) {
  group_->health()->checkProcess("training");
  std::unique_lock<std::mutex> lock(mutex_);
  double waited = 0;
  const auto over = [&] { return error_ || ready(); };
  if (!over()) {
    RECORD_FUNCTION(what, std::vector<c10::IValue>{});
    const auto start = Clock::now();
    if (!changed_.wait_for(lock, kSignalCheckInterval, over)) {
      // Who waits for all ranks meanwhile, in optimizer.state_dict() say, learns that this one does not come there.
      lock.unlock();
      group_->tellStep(channel_, 0, begun());
      checkSignals();
      lock.lock();
      waitInterruptibly(changed_, lock, over);
    }
    waited = millisecondsSince(start);
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  return waited;
}

bool DearSynchronizer::othersTrainOn() const { return group_->furthestStep(channel_, 0) > begun(); }

// With mutex_ held. A new plan begins with everything gathered, and so does the time after the end.
bool DearSynchronizer::isGathered(std::size_t parameter) const {
  return !buckets_ || !buckets_->holds(parameter) || gathering_[buckets_->bucketOf(parameter)] == 0;
}

void DearSynchronizer::waitTensors(const std::vector<std::int64_t>& tensors) {
  for (const std::int64_t tensor : tensors) {
    if (std::exchange(waited_.at(core::index(tensor)), 1) == 0) {
      forward_order_.push_back(tensor);
    }
  }
  if (gathering_count_ == 0 && !failed_) {
    return;
  }
  const double waited = waitUntil("torchext::dear::wait", [&] {
    return std::all_of(tensors.begin(), tensors.end(),
                       [this](std::int64_t tensor) { return isGathered(core::index(tensor)); });
  });
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.exposed_ag_ms += waited;
}

void DearSynchronizer::waitAll() {
  std::fill(waited_.begin(), waited_.end(), 1);
  if (gathering_count_ == 0 && !failed_) {
    return;
  }
  const double waited = waitUntil("torchext::dear::wait", [&] { return gathering_count_ == 0; });
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.exposed_ag_ms += waited;
}

void DearSynchronizer::synchronize() {
  group_->health()->checkUsable("synchronize");  // nothing may be under way here when the group fails
  waitAll();
}

void DearSynchronizer::waitExchanges() {
  // Each wait of an exchange has the group's timeout; one may just have begun, and the next behind it.
  const std::shared_ptr<ExchangeThread> exchange = exchange_;
  if (!exchange || exchange->waitIdle(2 * group_->timeout())) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) {
      std::rethrow_exception(error_);
    }
  }
  const std::string text = "no exchange ended within twice the group's timeout";
  group_->health()->poison(group_->getRank(), text);
  C10_THROW_ERROR(DistBackendError, c10::str(group_->health()->label(), ": ", text));
}

// ---- The end ----

void DearSynchronizer::fail(std::exception_ptr error) {
  // A broken connection becomes the error that names who died; the others learn of any other.
  error = group_->health()->explainToAll(error, OpInfo{.name = "training"});
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    failed_ = true;
  }
  changed_.notify_all();
}

void DearSynchronizer::checkNotLeft() const {
  if (!detached_) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) {
      std::rethrow_exception(error_);
    }
  }
  C10_THROW_ERROR(DistBackendError,
                  c10::str(group_->health()->label(), ": the averaged gradients ended with the ",
                           "process group; call optimizer.step() before it is destroyed, or before ", "sync.detach()"));
}

void DearSynchronizer::detach() {
  if (detached_) {
    return;
  }
  group_->health()->checkProcess("training");
  waitAll();
  waitExchanges();
  leave(std::chrono::milliseconds(0));
}

void DearSynchronizer::leave(std::chrono::milliseconds limit) {
  if (group_->health()->inForkedChild()) {
    return;
  }
  group_->removeShutdownCallback(shutdown_callback_);  // first: another thread may be leaving with the group
  if (!exchange_) {
    return;
  }
  // What the others still wait for must be sent; what they have not asked for yet need not.
  const auto sent = [this](std::chrono::milliseconds within) { return failed_ || exchange_->waitIdleFor(within); };
  if (!sent(limit) && limit.count() > 0 && !group_->outwaitTraining(sent)) {
    LOG(WARNING) << "dear [rank " << group_->getRank() << "]: leaving while parameters are on their way";
    group_->abortWithReason(c10::str("rank ", group_->getRank(), " left while parameters were on their way"));
  }
  detached_ = true;
  armed_ = false;
  hooks_->remove();
  if (dedicated_group_) {
    group_->health()->onFailure().remove(abort_callback_);
  }
  exchange_->discard();
  const auto posted = [](char flag) { return flag != 0; };
  if (!failed_ && (std::any_of(reducing_.begin(), reducing_.end(), posted) || gathering_count_ > 0)) {
    fail(group_->health()->failureOf({.name = "training"}));  // dropped: who waits for it is told
  }
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.rs_ms = exchange_->busyMilliseconds(ExchangeTask::Kind::kReduceScatter);
  stats_.ag_ms = exchange_->busyMilliseconds(ExchangeTask::Kind::kAllGather);
  stats_.bytes_sent = static_cast<std::int64_t>(transfers_->bytesSent());
  exchange_ = nullptr;
  // Holds an inner group, which must end with the process group.
  transfers_ = nullptr;
  dedicated_group_ = nullptr;
  buckets_ = nullptr;
}

DearStats DearSynchronizer::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  DearStats stats = stats_;
  stats.steps = steps_;
  stats.allreduce = planner_.plan().allreduce;
  stats.decided = planner_.decided();
  stats.allreduce_step_ms = 1e3 * planner_.allreduceSeconds();
  stats.bucket_bytes = planner_.plan().bucket_bytes;
  stats.trials = planner_.trials().trials;
  if (exchange_) {
    stats.rs_ms = exchange_->busyMilliseconds(ExchangeTask::Kind::kReduceScatter);
    stats.ag_ms = exchange_->busyMilliseconds(ExchangeTask::Kind::kAllGather);
    stats.bytes_sent = static_cast<std::int64_t>(transfers_->bytesSent());
  }
  if (buckets_) {
    stats.staging_bytes = static_cast<std::int64_t>(buckets_->stagingBytes());
    for (std::size_t b = 0; b < buckets_->size(); ++b) {
      stats.buckets.push_back(static_cast<std::int64_t>(buckets_->bytesOf(b)));
    }
  }
  return stats;
}

}  // namespace torchext
