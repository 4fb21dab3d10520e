// DelegatingBackend from construction to its end: options, shutdown, abort, destructor.
#include "c10d/delegating_backend.h"

#include <condition_variable>
#include <new>
#include <thread>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include "c10d/interpreter_lock.h"
#include "c10d/leaving.h"

namespace torchext {
namespace {

// What shutdown() gives to calls that are still under way, and the destructor to inner groups that will not end.
constexpr auto kDrainLimit = std::chrono::milliseconds(1000);
constexpr auto kDropLimit = std::chrono::milliseconds(800);
// The same at process exit, where a thread that is left behind could touch Python objects that are gone.
constexpr auto kExitLimit = std::chrono::milliseconds(5000);
// A tag of the data group on which nobody sends: see closeConnections().
constexpr int kClosingTag = 0x7fffffff;

// All living backends of this process, for leaveAll().
struct LiveBackends {
  std::mutex mutex;
  std::vector<DelegatingBackend*> backends;
};

LiveBackends& liveBackends() {
  static auto* instance = new LiveBackends;  // never destroyed: threads may outlive static destruction
  return *instance;
}

}  // namespace

DelegatingBackend::DelegatingBackend(int rank, int size, std::string name, InnerBackends inner,
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
  const auto* own = dynamic_cast<const GroupOptions*>(options_.get());
  const GroupOptions defaults("defaults");
  const GroupOptions& watched = own ? *own : defaults;
  watched.validateGroup();
  operation_timeout_ = watched.operation_timeout;
  health_->setMonitor(monitor_);
  health_->setGroupName(options_->group_name);
  health_->setConnectionCloser([this] { closeConnections(); });
  {
    std::lock_guard lock(liveBackends().mutex);
    liveBackends().backends.push_back(this);
  }
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
  events.verdict = [with_health](const Verdict& verdict) {
    with_health([&](GroupHealth& health) { health.receive(verdict); });
  };
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
    static_cast<void>(new (std::nothrow) std::shared_ptr<CallCheck>(std::move(calls_)));
    inner_.cpu.release();
    inner_.cuda.release();
    inner_.control.release();
    return;
  }
  {
    std::lock_guard lock(liveBackends().mutex);
    std::erase(liveBackends().backends, this);
  }
  try {
    DelegatingBackend::shutdown();
  } catch (const std::exception& error) {  // of a signal's handler; nobody is left to take it
    LOG(WARNING) << health_->label() << ": interrupted at its end: " << error.what();
  }
  withoutInterpreterLock([this] { dropInner(kDropLimit); });
}

void DelegatingBackend::shutdown() {
  if (health_->inForkedChild() || shutDown_.exchange(true)) {
    return;
  }
  withoutInterpreterLock([this] {
    onShutdown();
    health_->close(kDrainLimit);
    if (calls_) {
      calls_->stop();
    }
    monitor_->stop(/*goodbye=*/!health_->failed());
    health_->setConnectionCloser(nullptr);
    try {
      if (inner_.cuda) {
        inner_.cuda->shutdown();
      }
      inner_.cpu->shutdown();
    } catch (const std::exception& error) {
      LOG(WARNING) << health_->label() << ": shutdown of an inner backend failed: " << error.what();
    }
    // Ended here and not with this object, which a DDP model may keep: a peer's goodbye that arrives when nobody
    // receives any more stays in its socket, and Gloo's event loop spins on it.
    monitor_->releaseGroup();
    inner_.control.reset();
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

void DelegatingBackend::leaveAll(const std::string& reason) {
  std::lock_guard lock(liveBackends().mutex);
  const auto fail = [](DelegatingBackend& backend, const std::string& why) {
    if (!why.empty() && !backend.shutDown_) {
      const Leaving leaving;
      backend.health_->poison(backend.rank_, why);
    }
  };
  // All of them first: a shutdown may take seconds, and whoever shares several groups with this process learns of all.
  for (auto* backend : liveBackends().backends) {
    fail(*backend, reason);
  }
  std::string interrupted;
  std::exception_ptr interruption;
  for (auto* backend : liveBackends().backends) {
    if (backend->health_->inForkedChild()) {
      continue;
    }
    fail(*backend, interrupted);
    try {
      backend->shutdown();
    } catch (const std::exception&) {  // of a signal's handler: the other groups end too, without a wait
      interruption = std::current_exception();
      interrupted = c10::str("rank ", backend->rank_, " was interrupted as its process ended");
    }
    backend->dropInner(kExitLimit);
  }
  if (interruption) {
    std::rethrow_exception(interruption);
  }
}

// A Gloo wait that times out closes every connection of its group. That is the one way to end what is stuck inside
// Gloo, here and at the peers: wait one millisecond for a message that nobody sends.
void DelegatingBackend::closeConnections() noexcept {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) {
      continue;
    }
    try {
      Tensors tensors{at::empty({1}, at::kByte)};
      auto work = inner_.cpu->recv(tensors, peer, kClosingTag);
      work->wait(std::chrono::milliseconds(1));
    } catch (const std::exception& error) {
      // Either this peer's connection was closed already, and the next one is tried, or the wait did its work.
      if (std::string_view(error.what()).find("Timed out") != std::string_view::npos) {
        break;
      }
    }
  }
  try {
    if (inner_.cuda) {
      inner_.cuda->abort();
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << health_->label() << ": abort of the CUDA backend failed: " << error.what();
  }
}

void DelegatingBackend::dropInner(std::chrono::milliseconds limit) noexcept {
  auto inner = std::make_shared<InnerBackends>(std::exchange(inner_, {}));
  monitor_->releaseGroup();
  if (!health_->failed()) {
    inner.reset();
    return;
  }
  // Gloo's destructor joins its workers. After a failure one of them may still be inside a call: give it a moment, then
  // leave the rest to a thread of its own.
  auto done = std::make_shared<std::pair<std::mutex, std::condition_variable>>();
  auto finished = std::make_shared<bool>(false);
  std::thread([inner = std::move(inner), done, finished]() mutable {
    inner.reset();
    std::lock_guard lock(done->first);
    *finished = true;
    done->second.notify_all();
  }).detach();
  std::unique_lock lock(done->first);
  done->second.wait_for(lock, limit, [&] { return *finished; });
}

const c10::intrusive_ptr<c10d::Backend>& DelegatingBackend::inner(c10::DeviceType device) const {
  if (device == c10::DeviceType::CPU) {
    return inner_.cpu;
  }
  if (device == c10::DeviceType::CUDA) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        inner_.cuda, health_->label(),
        ": a CUDA tensor was given, but this group has no NCCL inner backend, because no GPU was "
        "visible to torch when the group was created; move the tensor to the CPU, or make a GPU "
        "visible before init_process_group()");
    return inner_.cuda;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, health_->label(), ": tensors on ", c10::DeviceTypeName(device, true),
                              " are not carried; this backend takes cpu and cuda tensors");
}

void DelegatingBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  inner_.cpu->setTimeout(timeout);
  if (inner_.cuda) {
    inner_.cuda->setTimeout(timeout);
  }
}

void DelegatingBackend::extendTimeout(const std::chrono::milliseconds& timeout) {
  addEphemeralTimeoutIfAny(*inner_.cpu, timeout);
  if (inner_.cuda) {
    addEphemeralTimeoutIfAny(*inner_.cuda, timeout);
  }
}

c10d::ErrorType DelegatingBackend::getError() {
  if (health_->failed()) {
    return c10d::ErrorType::REMOTE_ERROR;
  }
  return inner_.cuda ? inner_.cuda->getError() : c10d::ErrorType::SUCCESS;
}

void DelegatingBackend::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  if (options_->group_name.empty()) {
    health_->setGroupName(uid);
  }
  inner_.cpu->setGroupUid(uid);
  if (inner_.cuda) {
    inner_.cuda->setGroupUid(uid);
  }
}

void DelegatingBackend::eagerConnectSingleDevice(at::Device device) {
  if (inner_.cuda && device.is_cuda()) {
    inner_.cuda->eagerConnectSingleDevice(device);
  }
}

bool DelegatingBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  return inner_.cuda && inner_.cuda->supportsTensorAlloc(index);
}

at::Tensor DelegatingBackend::allocateTensor(long size, at::TensorOptions options) {
  return needDeviceInner("allocateTensor").allocateTensor(size, options);
}

std::shared_ptr<c10::Allocator> DelegatingBackend::getMemAllocator() {
  return needDeviceInner("getMemAllocator").getMemAllocator();
}

void DelegatingBackend::enableCollectivesTiming() {
  inner_.cpu->enableCollectivesTiming();
  if (inner_.cuda) {
    inner_.cuda->enableCollectivesTiming();
  }
}

bool DelegatingBackend::supportsTimeEstimation() const { return inner_.cuda && inner_.cuda->supportsTimeEstimation(); }

void DelegatingBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  needDeviceInner("registerOnCompletionHook").registerOnCompletionHook(std::move(hook));
}

void DelegatingBackend::waitForPendingWorks() { needDeviceInner("waitForPendingWorks").waitForPendingWorks(); }

}  // namespace torchext
