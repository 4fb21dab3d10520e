#include "ddp/dear/bucket_arrivals.h"

#include <algorithm>
#include <utility>

#include "c10d/threads/interruptible_wait.h"
#include "ddp/common/elapsed.h"

namespace torchext {

std::size_t BucketArrivals::Posted::reducedInOrder() const {
  return static_cast<std::size_t>(std::find(reducing_.begin(), reducing_.end(), 1) - reducing_.begin());
}

bool BucketArrivals::Posted::isGathered(std::size_t tensor) const {
  return bucket_of_[tensor] == kNone || gathering_[bucket_of_[tensor]] == 0;
}

void BucketArrivals::reset(std::size_t buckets, std::vector<std::size_t> bucket_of) {
  std::lock_guard<std::mutex> lock(mutex_);
  posted_.bucket_of_ = std::move(bucket_of);
  posted_.reducing_.assign(buckets, 0);
  posted_.gathering_.assign(buckets, 0);
}

void BucketArrivals::reducePosted(std::size_t bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  posted_.reducing_[bucket] = 1;
}

void BucketArrivals::reduced(std::size_t bucket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted_.reducing_[bucket] = 0;
  }
  changed_.notify_all();
}

void BucketArrivals::gathersPosted() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::fill(posted_.gathering_.begin(), posted_.gathering_.end(), 1);
  posted_.gathering_count_ = static_cast<int>(posted_.gathering_.size());
}

void BucketArrivals::gathered(std::size_t bucket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted_.gathering_[bucket] = 0;
    --posted_.gathering_count_;
  }
  changed_.notify_all();
}

bool BucketArrivals::anyPosted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return posted_.reducedInOrder() < posted_.reducing_.size() || !posted_.allGathered();
}

void BucketArrivals::fail(std::exception_ptr error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    failed_ = true;
  }
  changed_.notify_all();
}

void BucketArrivals::rethrow() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
}

bool BucketArrivals::check(const Ready& ready) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
  return ready(posted_);
}

void BucketArrivals::wait(Exposed exposed, const Ready& ready, const std::function<void()>& late) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto start = Clock::now();
  const auto over = [&] { return error_ || ready(posted_); };
  if (!changed_.wait_for(lock, kSignalCheckInterval, over)) {
    lock.unlock();
    late();
    checkSignals();
    lock.lock();
    waitInterruptibly(changed_, lock, over);
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  exposed_ms_[static_cast<int>(exposed)] += millisecondsSince(start);
}

double BucketArrivals::exposedMilliseconds(Exposed kind) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return exposed_ms_[static_cast<int>(kind)];
}

}  // namespace torchext
