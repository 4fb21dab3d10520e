#include "c10d/fault/first_reason.h"

namespace torchext {

bool FirstReason::set(Kind kind, int rank, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (set_.load()) {
    return false;
  }
  kind_ = kind;
  reason_ = {rank, core::cutReason(text)};
  if (kind == Kind::kPeerDied || kind == Kind::kDeparture) {
    lost_.insert(rank);
  }
  set_.store(true, std::memory_order_release);
  changed_.notify_all();
  return true;
}

FirstReason::Reason FirstReason::get() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

FirstReason::Kind FirstReason::kind() const {
  const std::lock_guard lock(mutex_);
  return kind_;
}

bool FirstReason::waitUntilSet(std::chrono::milliseconds limit) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return set_.load(); });
}

std::set<int> FirstReason::lostRanks() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void FirstReason::noteLost(int rank) {
  const std::lock_guard lock(mutex_);
  lost_.insert(rank);
}

}  // namespace torchext
