// DelegatingBackend from construction to its end: options, shutdown, abort, destructor.
#include "c10d/backend/delegating_backend.h"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include "c10d/backend/living_backends.h"
#include "c10d/fault/orderly_exit_scope.h"
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
// A tag of the data group on which nobody sends: see closeConnections().
constexpr int kClosingTag = 0x7fffffff;

}  // namespace

DelegatingBackend::DelegatingBackend(NotStarted, int rank, int size, std::string name, InnerBackends inner,
                                     c10::intrusive_ptr<Options> options)
    : CompatBackend(rank, size),
      name_(std::move(name)),
      inner_(std::move(inner)),
      options_(std::move(options)),
      health_(std::make_shared<GroupHealth>(name_, rank, size)),
      monitor_(std::make_shared<FailureMonitor>(inner_.control, rank, size)) {
  TORCH_CHECK_VALUE(inner_.cpu && options_, name_, ": needs a CPU backend and options");
  TORCH_CHECK_VALUE(inner_.control || size == 1, name_, ": needs a control group when there is more than one rank");
  for (const auto& backend : {inner_.cpu, inner_.cuda, inner_.control}) {
    TORCH_CHECK_VALUE(!backend || (backend->getRank() == rank && backend->getSize() == size), name_, ": inner backend ",
                      backend ? backend->getBackendName() : "", " does not have rank ", rank, " of ", size);
  }
  watchedOptions().validateGroup();
  operation_timeout_ = watchedOptions().operation_timeout;
  health_->setMonitor(monitor_);
  health_->setGroupName(options_->group_name);
}

// Where start() throws, the object exists, and its destructor ends what has begun.
DelegatingBackend::DelegatingBackend(int rank, int size, std::string name, InnerBackends inner,
                                     c10::intrusive_ptr<Options> options)
    : DelegatingBackend(NotStarted{}, rank, size, std::move(name), std::move(inner), std::move(options)) {
  try {
    start();
  } catch (...) {  // the others have the group already
    std::rethrow_exception(health_->explainToAll(std::current_exception(), OpInfo{.name = "making the group"}));
  }
}

const GroupOptions& DelegatingBackend::watchedOptions() const {
  static const auto& defaults = *new GroupOptions("defaults");
  const auto* own = dynamic_cast<const GroupOptions*>(options_.get());
  return own ? *own : defaults;
}

void DelegatingBackend::start() {
  health_->setConnectionCloser([this] { closeConnections(); });
  const GroupOptions& watched = watchedOptions();
  if (inner_.control && watched.call_check != "off") {
    const bool every = watched.call_check == "every" || c10d::debug_level() == c10d::DebugLevel::Detail;
    const auto mode = watched.call_check == "lines" ? CallCheck::Mode::kLines
                      : every                       ? CallCheck::Mode::kEvery
                                                    : CallCheck::Mode::kNew;
    calls_ = std::make_shared<CallCheck>(health_, monitor_, inner_.control, mode);
  }
  monitor_->start(watched.heartbeat_timeout, monitorEvents(watched.heartbeat_timeout));
}

// They hold what they use weakly: a thread of the monitor may outlive this object.
FailureMonitor::Events DelegatingBackend::monitorEvents(std::chrono::milliseconds patience) const {
  const auto with_health = [health = std::weak_ptr<GroupHealth>(health_)](auto&& use) {
    if (auto alive = health.lock()) {
      use(*alive);
    }
  };
  FailureMonitor::Events events;
  events.fault = [with_health](const FaultMessage& fault) {
    with_health([&](GroupHealth& health) { health.receive(fault); });
  };
  events.lost = [with_health](int rank) { with_health([&](GroupHealth& health) { health.noteLost(rank); }); };
  events.call = [calls = std::weak_ptr<CallCheck>(calls_)](const core::CallMessage& message) {
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
    with_health([&](GroupHealth& health) { health.suspect(successor, silence, last); });
  };
  events.heartbeat.tick = [with_health, patience] {
    with_health([&](GroupHealth& health) {
      health.expire();
      health.noteStall(patience);
    });
  };
  return events;
}

DelegatingBackend::~DelegatingBackend() {
  if (health_->inForkedChild()) {
    // The threads that destructors would join exist only in the parent: what has some is leaked.
    monitor_->abandon();
    health_->callbacks().abandon();
    static_cast<void>(new (std::nothrow) std::shared_ptr<CallCheck>(std::move(calls_)));
    inner_.cpu.release();
    inner_.cuda.release();
    inner_.control.release();
    return;
  }
  try {
    DelegatingBackend::shutdown();
  } catch (const std::exception& error) {  // of a signal's handler; nobody is left to take it
    LOG(WARNING) << health_->label() << ": interrupted at its end: " << error.what();
  }
  withoutInterpreterLock([this] { dropInner(Dropped::kAll, kDropLimit); });
}

void DelegatingBackend::shutdown() {
  if (health_->inForkedChild() || shutDown_.exchange(true)) {
    return;
  }
  const auto over = c10::make_scope_exit([this] {
    const std::lock_guard lock(shutdownMutex_);
    shutdownOver_ = true;
    shutdownChanged_.notify_all();
  });
  withoutInterpreterLock([this] {
    onShutdown();
    health_->close(kDrainLimit);
    health_->callbacks().finish(kCallbackLimit);
    if (calls_) {
      calls_->stop();
    }
    monitor_->stop(/*leave=*/!health_->failed());
    health_->setConnectionCloser(nullptr);
    try {
      const InnerBackends inner = innerBackends();
      if (inner.cuda) {
        inner.cuda->shutdown();
      }
      inner.cpu->shutdown();
    } catch (const std::exception& error) {
      LOG(WARNING) << health_->label() << ": shutdown of an inner backend failed: " << error.what();
    }
    // Ended here and not with this object, which a DDP model keeps until the garbage collector finds it: with it
    // threads and descriptors would stay. A peer's Leave that arrives when nobody receives any more stays in its
    // socket, and Gloo's event loop spins on it.
    dropInner(Dropped::kGloo, kDropLimit);
  });
  innerFactory_ = nullptr;  // the last moment at which it surely finds the interpreter that it may belong to
  if (auto interruption = std::exchange(interruption_, nullptr)) {
    std::rethrow_exception(interruption);
  }
}

void DelegatingBackend::abort() {
  if (health_->inForkedChild() || shutDown_) {
    return;
  }
  withoutInterpreterLock([this] { health_->abort(c10::str("rank ", rank_, " called abort()")); });
}

void DelegatingBackend::abortBecauseOf(int rank, const std::string& reason) {
  if (health_->inForkedChild() || shutDown_) {
    return;
  }
  withoutInterpreterLock([&] { health_->poison(rank, reason); });
}

void DelegatingBackend::release_resources() {
  if (!health_->inForkedChild()) {  // where the list's lock may be held for good; what is the parent's is leaked there
    LivingBackends::remove(*this);
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
  std::erase_if(backends, [](const auto& backend) { return backend->health_->inForkedChild(); });
  const auto fail = [](DelegatingBackend& backend, const std::string& why) {
    if (!why.empty() && !backend.shutDown_) {
      const OrderlyExitScope orderly_exit;
      backend.health_->poison(backend.rank_, why);
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
      backend->dropInner(Dropped::kAll, kExitLimit);
    }
  }
  if (interruption) {
    std::rethrow_exception(interruption);
  }
}

// A Gloo wait that times out closes every connection of its group. That is the one way to end what is stuck inside
// Gloo, here and at the peers: wait one millisecond for a message that nobody sends.
void DelegatingBackend::closeConnections() noexcept {
  const InnerBackends inner = innerBackends();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) {
      continue;
    }
    try {
      Tensors tensors{at::empty({1}, at::kByte)};
      auto work = inner.cpu->recv(tensors, peer, kClosingTag);
      work->wait(std::chrono::milliseconds(1));
    } catch (const std::exception& error) {
      // Either this peer's connection was closed already, and the next one is tried, or the wait did its work.
      if (std::string_view(error.what()).find("Timed out") != std::string_view::npos) {
        break;
      }
    }
  }
  try {
    if (inner.cuda) {
      inner.cuda->abort();
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << health_->label() << ": abort of the CUDA backend failed: " << error.what();
  }
}

}  // namespace torchext
