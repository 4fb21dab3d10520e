// BucketArrivals tells which buckets are on their way, and has threads wait until they have arrived.
//
// A bucket is on its way from reducePosted() to reduced(). All buckets are from gathersPosted() on, each to its
// gathered(). An error (fail()) ends every wait, those that begin later too, and is thrown by it.
//
// Threads: any. One lock guards all; what takes none says so. No torch: the class runs under ThreadSanitizer as it is.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

namespace torchext {

class BucketArrivals {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  // What a wait looks at.
  class Posted {
   public:
    bool isReduced(std::size_t bucket) const { return reducing_[bucket] == 0; }
    // How many have been reduced, up to the first that has not.
    std::size_t reducedInOrder() const;
    // The bucket of this tensor; true of a tensor in no bucket.
    bool isGathered(std::size_t tensor) const;
    bool allGathered() const { return gathering_count_ == 0; }

   private:
    friend class BucketArrivals;
    std::vector<std::size_t> bucket_of_;  // [tensor] or kNone
    std::vector<char> reducing_;          // [bucket]
    std::vector<char> gathering_;         // [bucket]
    std::atomic<int> gathering_count_{0};
  };
  using Ready = std::function<bool(const Posted&)>;

  // What exposedMilliseconds() counts a wait as.
  enum class Exposed { kReduceScatter, kAllGather, kNothing };

  // Other buckets; nothing may be on its way. bucket_of[tensor]: kNone where it is in none.
  void reset(std::size_t buckets, std::vector<std::size_t> bucket_of);
  // Takes no lock: for the thread that calls reset().
  std::size_t size() const { return posted_.reducing_.size(); }

  void reducePosted(std::size_t bucket);
  void reduced(std::size_t bucket);
  void gathersPosted();
  void gathered(std::size_t bucket);
  bool anyPosted() const;

  void fail(std::exception_ptr error);
  // Takes no lock.
  bool failed() const { return failed_; }
  // Throws the error, if there is one.
  void rethrow() const;

  // Whether no wait for a gather would block or throw. Takes no lock: a module's pre-hook passes by it.
  bool quiet() const { return posted_.gathering_count_ == 0 && !failed_; }
  // Whether it is so already.
  bool check(const Ready& ready) const;
  // Until it is so. A signal interrupts it (c10d/threads/interruptible_wait.h). late: called once, without the lock,
  // when the wait has lasted for kSignalCheckInterval.
  void wait(Exposed exposed, const Ready& ready, const std::function<void()>& late);
  // Milliseconds that wait() took.
  double exposedMilliseconds(Exposed kind) const;

 private:
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Posted posted_;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  double exposed_ms_[3] = {0, 0, 0};  // [Exposed]
};

}  // namespace torchext
