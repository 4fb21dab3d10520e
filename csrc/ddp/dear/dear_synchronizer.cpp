#include "ddp/dear/dear_synchronizer.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include "core/base/check.h"
#include "ddp/common/attach_agreement.h"
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

std::optional<DearPlan> checked(std::optional<DearPlan> planned, const std::vector<at::Tensor>& parameters) {
  if (planned) {
    for (std::vector<std::int64_t> order : {planned->gradient_order, planned->forward_order}) {
      std::sort(order.begin(), order.end());
      TORCH_CHECK_VALUE(order == trainable(parameters),
                        "dear: the orders of a plan must have every trained parameter once");
    }
    ShardBuckets::checkEnds(parameters, planned->gradient_order, planned->ends);
  }
  return planned;
}

// Behind all that the backward pass has queued for its end, and what that queues: DDP's reducer does either.
void atTheVeryEnd(std::function<void()> action) {
  const auto queue = [](std::function<void()> callback) {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
  };
  queue([queue, action = std::move(action)] { queue(action); });
}

std::vector<std::string> namesOf(const std::vector<std::int64_t>& order, const std::vector<std::string>& names) {
  std::vector<std::string> result;
  result.reserve(order.size());
  for (const std::int64_t tensor : order) {
    result.push_back(names[core::index(tensor)]);
  }
  return result;
}

}  // namespace

DearSynchronizer::DearSynchronizer(c10::intrusive_ptr<ProcessGroupDear> group, std::vector<at::Tensor> parameters,
                                   std::vector<std::string> names, bool unused_allowed, std::optional<double> bucket_mb,
                                   std::optional<DearPlan> planned, const MakeDedicatedGroup& make_dedicated_group)
    : group_(std::move(group)),
      parameters_(std::move(parameters)),
      names_(std::move(names)),
      replicated_(group_->dearOptions().form == "replicated"),
      unused_allowed_(unused_allowed),
      planner_(*group_, bytesOf(parameters_), trainable(parameters_),
               bucket_mb.value_or(group_->dearOptions().bucket_mb), checked(std::move(planned), parameters_)),
      waited_(parameters_.size(), 1),
      local_(parameters_, names_),
      pass_(parameters_, names_, [this] { backwardEnds(); }) {
  const auto& options = group_->dearOptions();
  std::vector<std::string> described;
  described.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    described.push_back(names_[i] + (parameters_[i].requires_grad() ? "" : " (frozen)"));
    addresses_.push_back(parameters_[i].data_ptr());
  }
  const c10::Device device = parameters_.empty() ? c10::Device(c10::kCPU) : parameters_.front().device();
  const double bucket = bucket_mb.value_or(options.bucket_mb);
  const DearPlan& plan = planner_.plan();
  const bool hierarchical = options.transport == "hierarchical" || plan.hierarchical;
  AgreementFields fields{agreementOf("parameters", parameters_, described),
                         {"type of device", c10::DeviceTypeName(device.type(), /*lower_case=*/true)},
                         {"transport by collectives", static_cast<bool>(make_dedicated_group)},
                         {"transport hierarchical", hierarchical},
                         {"bucket_mb", bucket == 0 ? std::nullopt : std::optional(bucket)},
                         {"ends of the plan's buckets", c10::str(plan.ends)},
                         {"gradient in order", namesOf(plan.gradient_order, names_)},
                         {"parameter in order", namesOf(plan.forward_order, names_)}};
  const AgreementFields same = optionsAgreement(options, group_->getSize());
  fields.insert(fields.end(), same.begin(), same.end());
  agreeOnAttach(*group_, fields);
  exchanges_ = std::make_unique<BucketExchanges>(group_, parameters_, hierarchical, make_dedicated_group);
  if (replicated_) {
    form_ = std::make_unique<ReplicatedForm>(parameters_, names_, pass_, *exchanges_);
  } else {
    form_ = std::make_unique<ShardedForm>(*group_, parameters_, names_, planner_.plan(), pass_, local_, *exchanges_);
  }
  rebuild();
  hooks_ = std::make_unique<GradientHooks>(
      parameters_, [this](std::size_t i) { form_->beforeAccumulation(i); },
      [this](std::size_t i) { gradientReady(i); });
  shutdown_callback_ = group_->addShutdownCallback([this] { leave(std::chrono::milliseconds(1500)); });
}

DearSynchronizer::~DearSynchronizer() { DearSynchronizer::leave(std::chrono::seconds(2)); }

void DearSynchronizer::rebuild() {
  if (exchanges_->buckets() == nullptr) {
    pass_.disarm();  // under all-reduce no pass ends what a forward pass has armed
  }
  exchanges_->rebuild(planner_.plan());
  pass_.reset(exchanges_->buckets());
}

// ---- Backward ----

void DearSynchronizer::expectBackward(bool exchanges) {
  pass_.expect(exchanges && !exchanges_->ended() && !inForkedChild());
  if (pass_.armed() && exchanges_->buckets() != nullptr) {
    // Kept, they are what this pass adds to while they are being sent; dropped (clearGradients), their arrival would be
    // taken for that of this pass.
    exchanges_->finishUnstepped();
  }
  if (pass_.armed() && exchanges_->buckets() != nullptr) {  // no signal's handler has ended them meanwhile
    exchanges_->expectReduction();
  }
}

void DearSynchronizer::gradientReady(std::size_t parameter) {
  if (!pass_.armed()) {
    local_.note(parameter);
    return;
  }
  local_.averaged(parameter);
  const at::Tensor gradient = pass_.denseGradient(parameter);
  if (!pass_.begun()) {
    pass_.begin();
    form_->backwardBegins();
  }
  TORCH_CHECK(waited_[parameter] || exchanges_->buckets() == nullptr, "dear: parameter ", names_[parameter],
              " was used in a forward pass that did not wait for it (its module was not called, and had been in the "
              "first forward pass); call sync.wait() before such a forward pass");
  pass_.add(parameter, gradient);
  postReady();
}

// Called by autograd when everything else of the backward pass is over.
void DearSynchronizer::backwardEnds() {
  pass_.disarm();
  if (exchanges_->buckets() == nullptr) {  // DDP's reducer averages no further pass of this forward pass, either
    local_.allAveraged();
    if (!planner_.settled()) {
      atTheVeryEnd([this] { planPass(); });  // a collective stands behind the reducer's
    }
    return;
  }
  const std::string missing = unused_allowed_ ? std::string() : pass_.missing(planner_.plan().gradient_order);
  if (!missing.empty()) {
    const std::string text = c10::str("no gradient for ", missing,
                                      " in this backward pass; every rank must use every parameter, or wrap the ",
                                      "model with DistributedDataParallel(..., find_unused_parameters=True)");
    group_->health()->poison(group_->getRank(), text);  // the others wait for these gradients
    C10_THROW_ERROR(DistBackendError, c10::str(group_->health()->label(), ": ", text));
  }
  pass_.end();
  postReady();
  local_.allAveraged();
  form_->backwardEnds();
  if (on_reduced_) {
    on_reduced_();
  }
  planPass();
}

// Behind everything that other ranks wait for in this pass, for a decision waits for rank 0. And first for what they
// send: a rank that has not come to this pass is named by those waits.
void DearSynchronizer::planPass() {
  if (exchanges_->ended()) {
    return;
  }
  if (!planner_.decided() && !parameters_.empty()) {
    synchronizeDevice(parameters_.front().device());  // what is measured is a pass, not how soon it was queued
  }
  if (planner_.afterPass()) {
    exchanges_->waitReducedBeyond(exchanges_->bucketCount());
    planner_.decide(pass_.order(), forward_order_);
  }
}

void DearSynchronizer::postReady() {
  while (std::optional<BackwardPass::Bucket> bucket = pass_.takeReady()) {
    exchanges_->reduceScatter(bucket->index, std::move(bucket->gradients));
  }
}

// ---- Step ----

ShardedForm& DearSynchronizer::shardedForm() {
  TORCH_CHECK(!replicated_, "dear: the replicated form has no slices of gradients");
  return static_cast<ShardedForm&>(*form_);
}

ReplicatedForm& DearSynchronizer::replicatedForm() {
  TORCH_CHECK(replicated_, "dear: the sharded form has no whole gradients");
  return static_cast<ReplicatedForm&>(*form_);
}

void DearSynchronizer::beforeStep() {
  group_->health()->checkProcess("training");
  if (!replicated_) {
    waitAll();  // replicated: gradients are gathered, and each is waited for by itself
  }
  form_->checkStep();
  local_.checkStep();
}

std::vector<std::int64_t> DearSynchronizer::takeMoved() {
  std::vector<std::int64_t> moved;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].data_ptr() == addresses_[i]) {
      continue;
    }
    moved.push_back(static_cast<std::int64_t>(i));
    if (exchanges_->bucketOf(i)) {
      TORCH_CHECK(
          exchanges_->buckets()->follow(i, parameters_[i]), "dear: parameter ", names_[i], " has become ",
          parameters_[i].toString(), parameters_[i].sizes(), " since torchext.attach (model.to(), .data = ...); ",
          "it may be given other memory of the same shape, strides, dtype and device; change a model before it ",
          "is wrapped in DistributedDataParallel and attached");
    }
    addresses_[i] = parameters_[i].data_ptr();
  }
  return moved;
}

void DearSynchronizer::clearGradients() {
  pass_.clear();
  form_->clearGradients();
}

void DearSynchronizer::afterStep() {
  ++steps_;
  exchanges_->noteStep(pass_.complete());
  pass_.clear();
  form_->afterStep();
  if (exchanges_->buckets() != nullptr) {
    std::fill(waited_.begin(), waited_.end(), 0);
  }
  planner_.afterStep();
  forward_order_.clear();
  adoptPlan();
}

bool DearSynchronizer::adoptPlan() {
  if (!planner_.adopt()) {
    return false;
  }
  waitAll();
  exchanges_->waitIdle();
  if (!exchanges_->ended()) {  // by a signal's handler
    rebuild();
  }
  return true;
}

// ---- Forward ----

void DearSynchronizer::waitTensors(const std::vector<std::int64_t>& tensors) {
  for (const std::int64_t tensor : tensors) {
    if (std::exchange(waited_.at(core::index(tensor)), 1) == 0) {
      forward_order_.push_back(tensor);
    }
  }
  if (!exchanges_->quiet()) {
    exchanges_->waitGathered(tensors);
  }
}

void DearSynchronizer::waitAll() {
  std::fill(waited_.begin(), waited_.end(), 1);
  if (!exchanges_->quiet()) {
    exchanges_->waitAllGathered();
  }
}

void DearSynchronizer::synchronize() {
  group_->health()->checkUsable("synchronize");  // nothing may be under way here when the group fails
  waitAll();
}

// ---- The end ----

void DearSynchronizer::detach() {
  if (exchanges_->ended()) {
    return;
  }
  group_->health()->checkProcess("training");
  waitAll();
  exchanges_->waitIdle();
  leave(std::chrono::milliseconds(0));
}

void DearSynchronizer::leave(std::chrono::milliseconds limit) {
  if (group_->health()->inForkedChild()) {
    return;
  }
  group_->removeShutdownCallback(shutdown_callback_);  // first: another thread may be leaving with the group
  if (!exchanges_->finishSending(limit)) {
    return;
  }
  pass_.disarm();
  hooks_->remove();
  exchanges_->end();
}

DearStats DearSynchronizer::stats() const {
  DearStats stats;
  stats.steps = steps_;
  stats.allreduce = planner_.plan().allreduce;
  stats.decided = planner_.decided();
  stats.allreduce_step_ms = 1e3 * planner_.allreduceSeconds();
  stats.bucket_bytes = planner_.plan().ends.empty() ? planner_.plan().bucket_bytes : 0;
  stats.trials = planner_.trials().trials;
  exchanges_->addTo(stats);
  return stats;
}

}  // namespace torchext
