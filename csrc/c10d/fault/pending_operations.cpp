#include "c10d/fault/pending_operations.h"

#include <utility>
#include <vector>

namespace torchext {

void PendingOperations::link(PendingOperation* operation, const OpInfo& op) {
  operation->op_ = op;
  if (op.limit.count() > 0) {
    operation->deadline_ = std::chrono::steady_clock::now() + op.limit;
  }
  operation->next_ = first_;
  if (first_ != nullptr) {
    first_->link_ = &operation->next_;
  }
  operation->link_ = &first_;
  first_ = operation;
}

void PendingOperations::remove(PendingOperation* operation) noexcept {
  std::lock_guard lock(mutex_);
  if (operation->link_ == nullptr) {
    return;
  }
  *operation->link_ = operation->next_;
  if (operation->next_ != nullptr) {
    operation->next_->link_ = operation->link_;
  }
  operation->link_ = nullptr;
  operation->next_ = nullptr;
  if (waiting_ > 0) {
    changed_.notify_all();
  }
}

std::optional<OpInfo> PendingOperations::late() const {
  const auto now = std::chrono::steady_clock::now();
  std::lock_guard lock(mutex_);
  for (const auto* operation = first_; operation != nullptr; operation = operation->next_) {
    if (operation->deadline_ <= now) {
      return operation->op_;
    }
  }
  return std::nullopt;
}

std::optional<OpInfo> PendingOperations::oldestCollective(std::chrono::steady_clock::time_point after) const {
  std::lock_guard lock(mutex_);
  const OpInfo* oldest = nullptr;
  for (const auto* operation = first_; operation != nullptr; operation = operation->next_) {
    const OpInfo& op = operation->op_;
    if (op.sequence > 0 && op.since > after && (oldest == nullptr || op.since < oldest->since)) {
      oldest = &op;
    }
  }
  return oldest == nullptr ? std::nullopt : std::optional(*oldest);
}

void PendingOperations::interruptBackground() {
  std::lock_guard lock(mutex_);
  for (auto* operation = first_; operation != nullptr; operation = operation->next_) {
    if (operation->op_.background) {
      operation->interrupt();
    }
  }
}

void PendingOperations::interruptAll() {
  std::vector<std::function<void()>> remaining;
  {
    std::lock_guard lock(mutex_);
    for (auto* operation = first_; operation != nullptr; operation = operation->next_) {
      if (auto rest = operation->interrupt()) {
        remaining.push_back(std::move(rest));
      }
    }
  }
  for (const auto& rest : remaining) {
    rest();
  }
}

bool PendingOperations::waitUntilIdle(std::chrono::milliseconds limit, const std::function<bool()>& enough) {
  std::unique_lock lock(mutex_);
  ++waiting_;
  const bool done = changed_.wait_for(lock, limit, [&] { return idle() || (enough && enough()); });
  --waiting_;
  return done;
}

void PendingOperations::notify() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

bool PendingOperations::idle() const {
  const auto* operation = first_;
  while (operation != nullptr && operation->op_.background) {
    operation = operation->next_;
  }
  return operation == nullptr;
}

}  // namespace torchext
