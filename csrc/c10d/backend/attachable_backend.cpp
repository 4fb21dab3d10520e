#include "c10d/backend/attachable_backend.h"

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "c10d/fault/explain_error.h"
#include "c10d/fault/group_waits.h"
#include "c10d/fault/local_error.h"
#include "c10d/fault/orderly_exit_scope.h"
#include "c10d/threads/interruptible_wait.h"
#include "c10d/threads/outstanding_averages.h"
#include "c10d/transport/shared_windows.h"

namespace torchext {

PointToPoint::WaitUntilFunction AttachableBackend::untilSeen() {
  return [this](const PointToPoint::Look& look, int peer, const char* what) {
    waitUntil(*health(), look, timeout(), {.name = what, .peer = peer});
  };
}

PointToPoint::RefuseFunction AttachableBackend::refusal() {
  return [this](int peer, const char* what, const std::string& error) {
    return refuse(*health(), {.name = what, .peer = peer}, error);
  };
}

PointToPoint AttachableBackend::dataTransport() {
  return {inner().of(c10::DeviceType::CPU),
          [this](const PointToPoint::WorkPtr& work, int peer, const char* what) {
            waitPointToPoint(*health(), work, timeout(), {.name = what, .peer = peer});
          },
          untilSeen(), refusal()};
}

PointToPoint AttachableBackend::controlTransport() {
  return {control(),
          [this](const PointToPoint::WorkPtr& work, int peer, const char* what) {
            // Not Gloo's timeout: it closes the connections by which the ranks watch each other.
            waitPointToPoint(*health(), work, FailureMonitor::kForever,
                             {.name = what, .peer = peer, .limit = timeout()});
          },
          untilSeen(), refusal(),
          [monitor = health()->monitor()](const PointToPoint::WorkPtr& work) { monitor->keep(work); }};
}

std::unique_ptr<SharedWindows> AttachableBackend::shareMemory(int tag, bool enabled) {
  try {
    return SharedWindows::open(dataTransport(), tag, enabled);
  } catch (...) {
    // Where a peer has died, Gloo may refuse to post a message, before anybody has said who it is.
    std::rethrow_exception(explain(*health(), std::current_exception(), {.name = "sharing memory"}));
  }
}

int AttachableBackend::nextChannel() {
  std::lock_guard<std::mutex> lock(mutex_);
  return kGroupTags + kTagsPerChannel * ++channels_;
}

std::uint64_t AttachableBackend::addShutdownCallback(std::function<void()> callback) {
  std::lock_guard<std::mutex> lock(mutex_);
  shutdown_callbacks_.emplace(++next_callback_, std::move(callback));
  return next_callback_;
}

void AttachableBackend::removeShutdownCallback(std::uint64_t id) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto removed = shutdown_callbacks_.extract(id);
  // What it captured goes with the caller.
  callback_over_.wait(
      lock, [&] { return id == 0 || running_callback_ != id || shutdown_thread_ == std::this_thread::get_id(); });
  lock.unlock();
}

bool AttachableBackend::outwaitTraining(const std::function<bool(std::chrono::milliseconds)>& left) noexcept {
  if (!inShutdown()) {
    return false;
  }
  LOG(WARNING) << health()->label() << ": destroy_process_group() waits for workers that still train with this one, as "
               << "sync.detach() does; each wait has the group's timeout, " << timeout().count() << " ms";
  try {
    while (!left(kSignalCheckInterval) && !health()->failed()) {
      checkSignals();
    }
  } catch (...) {
    raiseAfterShutdown(std::current_exception());
    const OrderlyExitScope orderly_exit;
    health()->poison(getRank(),
                     c10::str("rank ", getRank(), " was interrupted while it waited for those that still trained"));
  }
  return true;
}

void AttachableBackend::tellStep(int channel, std::uint32_t meeting, std::int64_t steps) noexcept {
  health()->monitor()->tell({.model = channel, .meeting = meeting, .steps = steps});
}

std::int64_t AttachableBackend::furthestStep(int channel, std::uint32_t meeting) const {
  const auto told = health()->monitor()->furthest(channel);
  return told && told->meeting == meeting ? told->steps : 0;
}

void AttachableBackend::abandonMeeting(const std::exception_ptr& error) {
  if (health()->failed()) {
    return;
  }
  const auto fault = localError(error);
  std::optional<OrderlyExitScope> orderly_exit;
  if (fault) {
    orderly_exit.emplace();
  }
  abortWithReason(c10::str("rank ", getRank(), fault ? " failed" : " was interrupted",
                           " while all workers were to meet", fault ? ": " + *fault : ""));
}

void AttachableBackend::announceMember(const c10::intrusive_ptr<c10d::Store>& store, int number) {
  const auto announce = [store, number](const char* state) {
    try {
      store->set(c10::str(state, "/", number), std::vector<std::uint8_t>{'1'});
    } catch (const std::exception& error) {
      LOG(WARNING) << "torchext: the store does not answer, so that this process will count as lost: " << error.what();
    }
  };
  health()->onFailure().add([announce] {
    if (!OrderlyExitScope::here()) {
      announce("alive");
    }
  });
  std::lock_guard<std::mutex> lock(mutex_);
  announcements_.emplace_back([announce] { announce("gone"); });
}

void AttachableBackend::announceLeaving() {
  std::vector<std::function<void()>> announcements;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    announcements.swap(announcements_);
  }
  for (const auto& announce : announcements) {
    announce();
  }
}

void AttachableBackend::withdrawAnnouncements() {
  std::vector<std::function<void()>> withdrawn;  // what they own goes without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  withdrawn.swap(announcements_);
}

void AttachableBackend::keep(std::shared_ptr<void> synchronizer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const void* key = synchronizer.get();
  kept_.emplace(key, std::move(synchronizer));
}

std::shared_ptr<void> AttachableBackend::release(const void* synchronizer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kept_.find(synchronizer);
  return found == kept_.end() ? nullptr : std::move(kept_.extract(found).mapped());
}

void AttachableBackend::onShutdown() {
  std::unique_lock<std::mutex> lock(mutex_);
  shutdown_thread_ = std::this_thread::get_id();
  while (!shutdown_callbacks_.empty()) {
    auto entry = shutdown_callbacks_.extract(shutdown_callbacks_.begin());
    running_callback_ = entry.key();
    lock.unlock();
    entry.mapped()();
    entry = {};  // what it captured goes without the lock
    lock.lock();
    running_callback_ = 0;
    callback_over_.notify_all();
  }
}

void AttachableBackend::beforeCollective() { OutstandingAverages::drain(WaitingFor::kEverybody); }

void AttachableBackend::beforeMessage() { OutstandingAverages::drain(WaitingFor::kSomebody); }

}  // namespace torchext
