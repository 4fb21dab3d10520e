#include "c10d/backend/delegating_backend.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include "c10d/backend/living_backends.h"
#include "c10d/fault/explain_error.h"
#include "c10d/fault/orderly_exit_scope.h"
#include "c10d/fault/stall_notice.h"
#include "c10d/threads/bounded_thread.h"
#include "c10d/threads/interpreter_lock.h"
#include "c10d/threads/interruptible_wait.h"

namespace torchext {
namespace {

// What shutdown() gives to calls that are still under way, and the destructor to inner groups that will not end.
constexpr auto kDrainLimit = std::chrono::milliseconds(1000);
constexpr auto kDropLimit = std::chrono::milliseconds(800);
// And to callbacks of futures.
constexpr auto kCallbackLimit = std::chrono::milliseconds(500);
// The same at process exit, where a thread that is left behind could touch Python objects that are gone.
constexpr auto kExitLimit = std::chrono::milliseconds(5000);

}  // namespace

DelegatingBackend::DelegatingBackend(NotStarted, int rank, int size, const std::string& name, InnerBackends inner,
                                     c10::intrusive_ptr<Options> options)
    : ForwardedCollectives(rank, size, name, std::move(inner), std::move(options)),
      monitor_(std::make_shared<FailureMonitor>(control(), rank, size)) {
  health()->setMonitor(monitor_);
}

// Where start() throws, the object exists, and its destructor ends what has begun.
DelegatingBackend::DelegatingBackend(int rank, int size, const std::string& name, InnerBackends inner,
                                     c10::intrusive_ptr<Options> options)
    : DelegatingBackend(NotStarted{}, rank, size, name, std::move(inner), std::move(options)) {
  try {
    start();
  } catch (...) {  // the others have the group already
    std::rethrow_exception(explainToAll(*health(), std::current_exception(), OpInfo{.name = "making the group"}));
  }
}

void DelegatingBackend::start() {
  health()->onFailure().setConnectionCloser([this] { inner().closeConnections(); });
  const GroupOptions& watched = groupOptions();
  if (control() && watched.call_check != "off") {
    const bool every = watched.call_check == "every" || c10d::debug_level() == c10d::DebugLevel::Detail;
    const auto mode = watched.call_check == "lines" ? CallCheck::Mode::kLines
                      : every                       ? CallCheck::Mode::kEvery
                                                    : CallCheck::Mode::kNew;
    callCheck() = std::make_shared<CallCheck>(health(), monitor_, control(), mode);
  }
  monitor_->start(watched.heartbeat_timeout, monitorEvents(watched.heartbeat_timeout));
}

// They hold what they use weakly: a thread of the monitor may outlive this object.
FailureMonitor::Events DelegatingBackend::monitorEvents(std::chrono::milliseconds patience) {
  const auto with_health = [health = std::weak_ptr<GroupHealth>(health())](auto&& use) {
    if (auto alive = health.lock()) {
      use(*alive);
    }
  };
  FailureMonitor::Events events;
  events.fault = [with_health](const FaultMessage& fault) {
    with_health([&](GroupHealth& health) { health.receive(fault); });
  };
  events.lost = [with_health](int rank) { with_health([&](GroupHealth& health) { health.reason().noteLost(rank); }); };
  events.call = [calls = std::weak_ptr<CallCheck>(callCheck())](const core::CallMessage& message) {
    if (auto alive = calls.lock()) {
      alive->received(message);
    }
  };
  events.heartbeat.progress = [with_health] {
    core::Progress progress;
    with_health([&](GroupHealth& health) { progress = health.progress().now(); });
    return progress;
  };
  events.heartbeat.silent = [with_health, successor = (rank_ + 1) % size_](std::chrono::duration<double> silence,
                                                                           const core::Progress& last) {
    with_health([&](GroupHealth& health) {
      health.poison(successor, health.progress().ofSilence(successor, silence, last, health.identity().rank()));
    });
  };
  events.heartbeat.tick = [with_health, stalls = std::make_shared<StallNotice>(patience)] {
    with_health([&](GroupHealth& health) {
      health.expire();
      stalls->look(health);
    });
  };
  return events;
}

DelegatingBackend::~DelegatingBackend() {
  if (health()->inForkedChild()) {
    // The threads that destructors would join exist only in the parent: what has some is leaked.
    monitor_->abandon();
    health()->callbacks().abandon();
    static_cast<void>(new (std::nothrow) std::shared_ptr<CallCheck>(std::move(callCheck())));
    inner().abandon();
    return;
  }
  try {
    DelegatingBackend::shutdown();
  } catch (const std::exception& error) {  // of a signal's handler; nobody is left to take it
    LOG(WARNING) << health()->label() << ": interrupted at its end: " << error.what();
  }
  withoutInterpreterLock([this] { dropInner(InnerGroups::Taken::kAll, kDropLimit); });
}

void DelegatingBackend::shutdown() {
  if (health()->inForkedChild() || shutDown_.exchange(true)) {
    return;
  }
  const auto over = c10::make_scope_exit([this] {
    const std::lock_guard lock(shutdownMutex_);
    shutdownOver_ = true;
    shutdownChanged_.notify_all();
  });
  withoutInterpreterLock([this] {
    onShutdown();
    health()->close(kDrainLimit);
    health()->callbacks().finish(kCallbackLimit);
    if (const auto& calls = callCheck()) {
      calls->stop();
    }
    monitor_->stop(/*leave=*/!health()->failed());
    health()->onFailure().setConnectionCloser(nullptr);
    try {
      const InnerBackends groups = inner().all();
      if (groups.cuda) {
        groups.cuda->shutdown();
      }
      groups.cpu->shutdown();
    } catch (const std::exception& error) {
      LOG(WARNING) << health()->label() << ": shutdown of an inner backend failed: " << error.what();
    }
    // Ended here and not with this object, which a DDP model keeps until the garbage collector finds it: with it
    // threads and descriptors would stay. A peer's Leave that arrives when nobody receives any more stays in its
    // socket, and Gloo's event loop spins on it.
    dropInner(InnerGroups::Taken::kGloo, kDropLimit);
  });
  innerFactory_ = nullptr;  // the last moment at which it surely finds the interpreter that it may belong to
  if (auto interruption = std::exchange(interruption_, nullptr)) {
    std::rethrow_exception(interruption);
  }
}

void DelegatingBackend::abort() {
  if (health()->inForkedChild() || shutDown_) {
    return;
  }
  withoutInterpreterLock([this] { health()->abort(c10::str("rank ", rank_, " called abort()")); });
}

void DelegatingBackend::abortBecauseOf(int rank, const std::string& reason) {
  if (health()->inForkedChild() || shutDown_) {
    return;
  }
  withoutInterpreterLock([&] { health()->poison(rank, reason); });
}

void DelegatingBackend::release_resources() {
  if (!health()->inForkedChild()) {  // where the list's lock may be held for good; what is the parent's is leaked there
    LivingBackends::remove(*this);
  }
}

void DelegatingBackend::dropInner(InnerGroups::Taken which, std::chrono::milliseconds limit) noexcept {
  health()->callbacks().finish(limit);
  auto groups = inner().take(which);
  monitor_->releaseGroup();
  if (!health()->failed()) {
    return;
  }
  // Gloo's destructor joins its workers. After a failure one of them may still be inside a call: give it a moment, then
  // leave the rest to a thread of its own. Where none is to be had the groups are left for good.
  try {
    BoundedThread("torchext_drop", [dropped = groups.release()] { delete dropped; }).finish(limit);
  } catch (const std::exception& error) {
    LOG(WARNING) << health()->label() << ": the inner groups are not destroyed: " << error.what();
  }
}

// Where another thread is at it: until it is done, which is bounded but for those that still train (outwaitTraining).
void DelegatingBackend::awaitShutdown() {
  shutdown();
  std::unique_lock lock(shutdownMutex_);
  waitInterruptibly(shutdownChanged_, lock, [this] { return shutdownOver_; });
}

// No lock is held meanwhile: a signal's handler, or another thread, may destroy groups of this process.
void DelegatingBackend::leaveAll(const std::string& reason) {
  auto backends = LivingBackends::all();
  std::erase_if(backends, [](const auto& backend) { return backend->health()->inForkedChild(); });
  const auto fail = [](DelegatingBackend& backend, const std::string& why) {
    if (!why.empty() && !backend.shutDown_) {
      const OrderlyExitScope orderly_exit;
      backend.health()->poison(backend.rank_, why);
    }
  };
  // All of them first: a shutdown may take seconds, and whoever shares several groups with this process learns of all.
  for (const auto& backend : backends) {
    fail(*backend, reason);
  }
  std::string interrupted;
  std::exception_ptr interruption;
  for (const auto& backend : backends) {
    fail(*backend, interrupted);
    try {
      backend->awaitShutdown();
    } catch (const std::exception&) {  // of a signal's handler: the other groups end too, without a wait
      interruption = std::current_exception();
      interrupted = c10::str("rank ", backend->rank_, " was interrupted as its process ended");
    }
    if (backend->shutdownOver()) {
      backend->dropInner(InnerGroups::Taken::kAll, kExitLimit);
    }
  }
  if (interruption) {
    std::rethrow_exception(interruption);
  }
}

c10::intrusive_ptr<c10d::Backend> DelegatingBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                           const std::vector<int>& ranks,
                                                           const c10::intrusive_ptr<Options>& opts) {
  health()->checkUsable("split");
  beforeCollective();
  InnerBackends children = inner().split(store, ranks, *opts);
  const auto position = std::find(ranks.begin(), ranks.end(), rank_);
  if (position == ranks.end()) {
    return nullptr;
  }
  return createChild(static_cast<int>(position - ranks.begin()), static_cast<int>(ranks.size()), std::move(children),
                     opts);
}

c10::intrusive_ptr<c10d::Backend> DelegatingBackend::createChild(int rank, int size, InnerBackends inner,
                                                                 c10::intrusive_ptr<Options> options) {
  return makeBackend<DelegatingBackend>(rank, size, getBackendName(), std::move(inner), std::move(options));
}

c10::intrusive_ptr<c10d::Backend> DelegatingBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                                            const c10::intrusive_ptr<Options>& opts_override) {
  TORCH_CHECK_NOT_IMPLEMENTED(!opts_override, health()->label(),
                              ": shrink_group takes no pg_options here; the new group has this one's");
  TORCH_CHECK_NOT_IMPLEMENTED(innerFactory_, health()->label(), ": this group cannot be shrunk any more");
  std::vector<int> remaining;
  auto options = c10::make_intrusive<Options>(getBackendName(), timeout());
  const auto global = getBackendOptions()->global_ranks_in_group;
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) == ranks_to_exclude.end()) {
      remaining.push_back(rank);
      const auto position = static_cast<std::size_t>(rank);
      options->global_ranks_in_group.push_back(position < global.size() ? global[position] : position);
    }
  }
  const auto self = std::find(remaining.begin(), remaining.end(), rank_);
  TORCH_CHECK_VALUE(self != remaining.end(), health()->label(), ": shrink_group called on a rank that it excludes");
  if (flags != 0) {
    abort();
  }
  c10::intrusive_ptr<c10d::Backend> child;
  withoutInterpreterLock([&] {
    const int rank = static_cast<int>(self - remaining.begin());
    const int size = static_cast<int>(remaining.size());
    child = createChild(rank, size, innerFactory_(remaining, rank), options);
  });
  // It may lose ranks again. Their numbers are of the first group, so that no two memberships meet in one place.
  static_cast<DelegatingBackend&>(*child).setInnerFactory(
      [factory = innerFactory_, remaining](const std::vector<int>& ranks, int rank) {
        std::vector<int> of_first;
        of_first.reserve(ranks.size());
        for (const int own : ranks) {
          of_first.push_back(remaining[static_cast<std::size_t>(own)]);
        }
        return factory(of_first, rank);
      });
  return child;
}

c10d::ErrorType DelegatingBackend::getError() {
  if (health()->failed()) {
    return c10d::ErrorType::REMOTE_ERROR;
  }
  const auto cuda = inner().all().cuda;
  return cuda ? cuda->getError() : c10d::ErrorType::SUCCESS;
}

void DelegatingBackend::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  if (getBackendOptions()->group_name.empty()) {
    health()->identity().setGroupName(uid);
  }
  for (const auto& group : inner().carriers()) {
    group->setGroupUid(uid);
  }
}

void DelegatingBackend::eagerConnectSingleDevice(at::Device device) {
  const auto cuda = inner().all().cuda;
  if (cuda && device.is_cuda()) {
    cuda->eagerConnectSingleDevice(device);
  }
}

bool DelegatingBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  const auto cuda = inner().all().cuda;
  return cuda && cuda->supportsTensorAlloc(index);
}

at::Tensor DelegatingBackend::allocateTensor(long size, at::TensorOptions options) {
  return needDeviceInner("allocateTensor").allocateTensor(size, options);
}

std::shared_ptr<c10::Allocator> DelegatingBackend::getMemAllocator() {
  return needDeviceInner("getMemAllocator").getMemAllocator();
}

void DelegatingBackend::enableCollectivesTiming() {
  for (const auto& group : inner().carriers()) {
    group->enableCollectivesTiming();
  }
}

bool DelegatingBackend::supportsTimeEstimation() const {
  const auto cuda = inner().all().cuda;
  return cuda && cuda->supportsTimeEstimation();
}

bool DelegatingBackend::supportsSplitting() const {
  const auto gloo = inner().all().cpu;
  return gloo && gloo->supportsSplitting();
}

void DelegatingBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  needDeviceInner("registerOnCompletionHook").registerOnCompletionHook(std::move(hook));
}

void DelegatingBackend::waitForPendingWorks() { needDeviceInner("waitForPendingWorks").waitForPendingWorks(); }

}  // namespace torchext
