#include "ddp/hop/hop_synchronizer.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>

#include "c10d/fault/orderly_exit_scope.h"
#include "c10d/threads/outstanding_averages.h"
#include "ddp/common/attach_agreement.h"
#include "ddp/common/elapsed.h"

namespace torchext {
namespace {

std::vector<std::string> inNeighbours(const core::CommunicationGraph& graph) {
  std::vector<std::string> texts;
  texts.reserve(core::index(graph.size()));
  for (int rank = 0; rank < graph.size(); ++rank) {
    texts.push_back(
        c10::str(c10::Join(", ", graph.inNeighbours(rank)), " (weights ", c10::Join(", ", graph.inWeights(rank)), ")"));
  }
  return texts;
}

std::uint64_t digestOf(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += c10::str(tensor.sizes(), c10::toString(tensor.scalar_type()), ";");
  }
  return static_cast<std::uint64_t>(agreementHash(text));
}

}  // namespace

HopSynchronizer::HopSynchronizer(c10::intrusive_ptr<ProcessGroupHop> group, const std::vector<at::Tensor>& parameters,
                                 const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& frozen)
    : group_(std::move(group)),
      graph_(group_->hopOptions().graphFor(group_->getSize())),
      mode_(group_->hopOptions().mode()),
      serial_(group_->hopOptions().order == "serial"),
      model_(parameters, buffers),
      tensors_(parameters, buffers),
      replica_average_(*group_, model_.parameters(), model_.buffers(), FrozenParameters(frozen)) {
  const int channel = group_->nextChannel();
  AgreementFields fields{agreementOf("parameters", parameters),
                         agreementOf("buffers", buffers),
                         agreementOf("frozen parameters", frozen),
                         {"HopOptions.graph's in-neighbours", inNeighbours(graph_)}};
  const AgreementFields options = optionsAgreement(group_->hopOptions(), group_->getSize());
  fields.insert(fields.end(), options.begin(), options.end());
  agreeOnAttach(*group_, fields);
  if (group_->getSize() > 1) {
    exchange_ = std::make_shared<HopExchange>(group_, model_, tensors_,
                                              HopSetup{.graph = graph_,
                                                       .mode = mode_,
                                                       .model_bytes = model_.bytes(),
                                                       .digest = digestOf(tensors_.tensors()),
                                                       .channel = channel});
  }
  shutdown_callback_ = group_->addShutdownCallback([this] { leave(std::chrono::milliseconds(1500)); });
}

HopSynchronizer::~HopSynchronizer() { HopSynchronizer::leave(std::chrono::seconds(2)); }

// ---- An iteration ----

void HopSynchronizer::begin() {
  const std::shared_ptr<HopExchange> exchange = exchange_;
  if (exchange && !inForkedChild() && !serial_ && !averaged_ && !exchange->isPublished()) {
    const at::NoGradGuard no_grad;
    exchange->publish();
  }
}

void HopSynchronizer::beforeStep() {
  group_->health()->checkProcess("training");
  waitAll();
  const std::shared_ptr<HopExchange> exchange = exchange_;
  if (!exchange || serial_ || averaged_) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (!exchange->isPublished()) {
    exchange->publish();
  }
  exchange->average();
  averaged_ = true;
}

void HopSynchronizer::afterStep() {
  const at::NoGradGuard no_grad;
  if (exchange_ && !serial_ && !averaged_) {
    beforeStep();  // a step without its pre-hook
  }
  waitAll();  // serial: a closure that steps twice
  ++iteration_;
  ++steps_made_;
  const std::shared_ptr<HopExchange> exchange = exchange_;
  if (!exchange) {
    return;
  }
  if (serial_) {
    exchange->publish();
    exchanging_ = true;
  } else {
    averaged_ = false;
    moveOn(*exchange);
    exchange->publish();
  }
}

// Serial: the exchange that the last step began.
void HopSynchronizer::finishIteration(HopExchange& exchange) {
  group_->health()->checkProcess("training");
  const at::NoGradGuard no_grad;
  exchange.average();
  exchanging_ = false;
  moveOn(exchange);
}

// To the next iteration, over some others if this worker is late.
void HopSynchronizer::moveOn(HopExchange& exchange) {
  iteration_ += exchange.advance();
  exchange.enter();
}

void HopSynchronizer::waitTensors(const std::vector<std::int64_t>& /*tensors*/) { waitAll(); }

void HopSynchronizer::waitAll() {
  if (const std::shared_ptr<HopExchange> exchange = exchange_) {
    exchange->checkUsable();
    exchange->enter();
    if (exchanging_) {
      finishIteration(*exchange);
    }
  }
}

// ---- Where all workers meet ----

void HopSynchronizer::checkAttached() const {
  group_->health()->checkProcess("training");
  TORCH_CHECK(!detached_, "hop: this synchronizer has been detached");
}

// What comes to an end in it, by what a signal's handler raises for one, leaves a mailbox that is half drained, and the
// others waiting: the group ends with it.
void HopSynchronizer::meet(const std::function<void()>& task) {
  OutstandingAverages::drain(WaitingFor::kEverybody);
  meeting_ = true;
  const auto over = c10::make_scope_exit([this] { meeting_ = false; });
  try {
    waitAll();
    task();
  } catch (...) {
    group_->abandonMeeting(std::current_exception());
    throw;
  }
}

void HopSynchronizer::drain(bool finally) {
  if (const std::shared_ptr<HopExchange> exchange = exchange_) {
    exchange->drain(finally);
  }
  averaged_ = false;
}

void HopSynchronizer::synchronize() {
  checkAttached();
  tensors_.takeBack("hop");
  const at::NoGradGuard no_grad;
  meet([this] {
    drain(false);
    consensus_distance_ = replica_average_.form();
  });
}

void HopSynchronizer::enterAverage() {
  checkAttached();
  replica_average_.checkNotEntered();
  tensors_.takeBack("hop");
  const at::NoGradGuard no_grad;
  meet([this] {
    drain(false);
    consensus_distance_ = replica_average_.enter();
  });
}

void HopSynchronizer::leaveAverage() { replica_average_.leave(); }

// ---- The end ----

void HopSynchronizer::detach() {
  if (detached_) {
    return;
  }
  group_->health()->checkProcess("training");
  meet([this] { drain(true); });
  leave(std::chrono::milliseconds(0));
}

void HopSynchronizer::leave(std::chrono::milliseconds limit) {
  if (group_->health()->inForkedChild()) {
    return;
  }
  group_->removeShutdownCallback(shutdown_callback_);          // first: another thread may be leaving with the group
  const std::shared_ptr<void> itself = group_->release(this);  // may be the last owner: goes last
  const bool orderly = !std::exchange(detached_, true) && limit.count() > 0;
  const std::shared_ptr<HopExchange> exchange = exchange_;
  if (!exchange) {
    return;
  }
  if (orderly) {
    group_->announceLeaving();
    const auto left = [&](std::chrono::milliseconds within) {
      try {
        return exchange->drain(true, within);
      } catch (const std::exception& error) {
        LOG(INFO) << "hop: left without the others: " << error.what();
        return true;
      }
    };
    // In a meeting the others have had this rank's farewell.
    if (meeting_ || (!left(limit) && !group_->outwaitTraining(left))) {
      LOG(WARNING) << "hop [rank " << group_->getRank() << "]: leaving while other workers still train; call "
                   << "sync.detach(), or evaluate under sync.averaged(), before the script ends";
      const OrderlyExitScope orderly_exit;
      group_->abortWithReason(c10::str("rank ", group_->getRank(), " left while others still trained with it"));
    }
  }
  exchange->stop();
  last_stats_ = exchange->stats();
  exchange_ = nullptr;
}

// ---- Figures ----

HopStats HopSynchronizer::hopStats() const {
  HopStats result = exchange_ ? exchange_->stats() : last_stats_;
  result.steps = steps_made_;
  result.consensus_distance = consensus_distance_;
  return result;
}

AveragingStats HopSynchronizer::stats() const {
  const HopStats all = hopStats();
  AveragingStats result;
  result.steps = all.steps;
  result.averages = all.averages;
  result.group_sizes = all.group_sizes;
  result.exposed_ms = all.model_wait_ms + all.token_wait_ms + all.send_wait_ms;
  result.peer_wait_ms = all.model_wait_ms;
  result.copy_ms = all.copy_ms;
  result.bytes_sent = all.bytes_sent;
  result.bucket_bytes = all.slot_bytes;
  result.iteration_gap = all.gaps.empty() ? 0 : std::max<std::int64_t>(0, -all.gaps.begin()->first);
  result.consensus_distance = all.consensus_distance;
  return result;
}

int HopSynchronizer::gapBound() const {
  const int rank = group_->getRank();
  const std::vector<int>& takers = graph_.outNeighbours(rank);
  const auto from_here = graph_.pathLengthsFrom(rank);
  int bound = 0;
  for (const int neighbour : graph_.inNeighbours(rank)) {
    if (neighbour != rank) {
      const bool gives_tokens = std::find(takers.begin(), takers.end(), neighbour) != takers.end();
      bound = std::max(bound, core::toldGapBound(mode_, gives_tokens, from_here[core::index(neighbour)]));
    }
  }
  return bound;
}

}  // namespace torchext
