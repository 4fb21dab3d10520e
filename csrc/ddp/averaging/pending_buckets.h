// PendingBuckets tracks which buckets of a model still wait for the average of a round, and lets threads wait for them.
//
// An error ends every wait, now and later. The first one stays.
//
// Threads: all functions may be called from any. settled() and failed() take no lock: a module's pre-hook passes by
// them thousands of times a second.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

namespace torchext {

class PendingBuckets {
 public:
  // Positions of tensors in registration order, parameters then buffers; none: all that there are.
  using Tensors = std::optional<at::IntArrayRef>;

  // bucket_of: of each tensor. count: of buckets.
  PendingBuckets(std::vector<std::int64_t> bucket_of, std::size_t count);

  // A round begins: all buckets are pending.
  void begin();
  // Nothing where the bucket is not pending.
  void release(std::size_t bucket);
  void releaseAll();
  void fail(std::exception_ptr error);

  bool failed() const { return failed_; }
  // Nothing is pending and nothing has failed: every wait would return at once.
  bool settled() const { return pending_count_ == 0 && !failed_; }
  void rethrow() const;

  // Whether these tensors are no longer pending, or an error has ended that.
  bool over(const Tensors& tensors) const;
  // The same, for at most `limit`.
  bool overWithin(std::chrono::milliseconds limit, const Tensors& tensors);
  // Handlers of signals run meanwhile (interruptible_wait.h).
  void wait(const Tensors& tensors);

 private:
  bool isOver(const Tensors& tensors) const;  // with mutex_ held

  const std::vector<std::int64_t> bucket_of_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<char> pending_;  // by bucket
  std::exception_ptr error_;
  std::atomic<int> pending_count_{0};  // written under the lock, as the next
  std::atomic<bool> failed_{false};
};

}  // namespace torchext
