#include "ddp/averaging/pending_buckets.h"

#include <algorithm>
#include <utility>

#include "c10d/threads/interruptible_wait.h"

namespace torchext {

PendingBuckets::PendingBuckets(std::vector<std::int64_t> bucket_of, std::size_t count)
    : bucket_of_(std::move(bucket_of)), pending_(count, 0) {}

void PendingBuckets::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::fill(pending_.begin(), pending_.end(), 1);
  pending_count_ = static_cast<int>(pending_.size());
}

void PendingBuckets::release(std::size_t bucket) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pending_[bucket] == 0) {
      return;
    }
    pending_[bucket] = 0;
    --pending_count_;
  }
  changed_.notify_all();
}

void PendingBuckets::releaseAll() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::fill(pending_.begin(), pending_.end(), 0);
    pending_count_ = 0;
  }
  changed_.notify_all();
}

void PendingBuckets::fail(std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) {
      error_ = std::move(error);
      failed_ = true;
    }
  }
  changed_.notify_all();
}

void PendingBuckets::rethrow() const {
  if (!failed_) {
    return;
  }
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error = error_;
  }
  std::rethrow_exception(error);
}

bool PendingBuckets::isOver(const Tensors& tensors) const {
  if (error_ || pending_count_ == 0) {
    return true;
  }
  return tensors && std::all_of(tensors->begin(), tensors->end(), [&](std::int64_t tensor) {
           const auto bucket = static_cast<std::size_t>(bucket_of_.at(static_cast<std::size_t>(tensor)));
           return pending_[bucket] == 0;
         });
}

bool PendingBuckets::over(const Tensors& tensors) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return isOver(tensors);
}

bool PendingBuckets::overWithin(std::chrono::milliseconds limit, const Tensors& tensors) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return isOver(tensors); });
}

void PendingBuckets::wait(const Tensors& tensors) {
  std::unique_lock<std::mutex> lock(mutex_);
  waitInterruptibly(changed_, lock, [&] { return isOver(tensors); });
}

}  // namespace torchext
