// ExchangeThread: runs the exchanges of a model one after the other, in the order posted, without a gap between them.
//
// While one exchange waits for its last bytes the next is begun already, so that the link does not run dry between two
// buckets. All ranks must post the same exchanges in the same order.
// With CUDA tensors an exchange begins after what the poster had queued on its stream, and what it gives is there, on
// the device, when `arrived` is called.
//
// Threads: post() from any; everything else of a task runs on the thread of this object.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "c10d/transport/shard_transport.h"
#include "ddp/common/side_stream.h"

namespace torchext {

struct ExchangeTask {
  enum class Kind { kReduceScatter, kAllGather };
  Kind kind;
  std::unique_ptr<ShardOperation> operation;
  std::function<void()> before;   // right before it begins: fills the buffer, which nobody sends from any more
  std::function<void()> unpack;   // takes what has come out of the buffer; may be none
  std::function<void()> arrived;  // all of it is done
  SideStream::Mark posted = nullptr;
  bool begun = false;
};

class ExchangeThread {
 public:
  // on_error: an exchange failed; it and all that follow are dropped. Called once, on the thread.
  ExchangeThread(c10::Device device, std::function<void(std::exception_ptr)> on_error);
  ~ExchangeThread() { discard(); }
  ExchangeThread(const ExchangeThread&) = delete;
  ExchangeThread& operator=(const ExchangeThread&) = delete;

  void post(ExchangeTask task);
  // Blocks until nothing is queued, running or undrained; false after an error, or when no exchange has ended for
  // `patience`. A signal interrupts it (c10d/threads/interruptible_wait.h).
  bool waitIdle(std::chrono::milliseconds patience);
  // The same for at most `limit` altogether, and without a look at signals: for the way out.
  bool waitIdleFor(std::chrono::milliseconds limit);
  // Drops what has not begun, and ends the thread once what has begun is over.
  void discard();

  // Milliseconds since construction during which exchanges of that kind were under way.
  double busyMilliseconds(ExchangeTask::Kind kind) const;

 private:
  void loop();
  std::unique_ptr<ExchangeTask> next();
  bool queueEmpty() const;
  void run(ExchangeTask& task);
  void begin(ExchangeTask& task);
  void beginNext(ExchangeTask::Kind current);
  void drainAll();
  bool idle() const { return failed_ || (queue_.empty() && !running_); }  // with mutex_ held

  const SideStream stream_;
  const std::function<void(std::exception_ptr)> on_error_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::unique_ptr<ExchangeTask>> queue_;
  bool running_ = false;
  std::uint64_t ended_ = 0;  // exchanges
  bool closed_ = false;
  bool failed_ = false;
  double busy_ms_[2] = {0, 0};

  // Of the thread alone.
  std::unique_ptr<ExchangeTask> begun_;                // by lookahead
  std::deque<std::unique_ptr<ExchangeTask>> sending_;  // arrived, not drained
  std::thread thread_;
};

}  // namespace torchext
