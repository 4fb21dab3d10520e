#include "ddp/dear/exchange_thread.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "c10d/fault/fault_points.h"
#include "c10d/threads/interruptible_wait.h"
#include "c10d/threads/start_thread.h"
#include "ddp/common/elapsed.h"

namespace torchext {
namespace {

const char* rangeName(ExchangeTask::Kind kind) {
  return kind == ExchangeTask::Kind::kReduceScatter ? "torchext::dear::reduce_scatter" : "torchext::dear::all_gather";
}

}  // namespace

ExchangeThread::ExchangeThread(c10::Device device, std::function<void(std::exception_ptr)> on_error)
    : stream_(device), on_error_(std::move(on_error)), thread_(startThread("tx_exchange", [this] { loop(); })) {}

void ExchangeThread::post(ExchangeTask task) {
  task.posted = stream_.mark();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_ || failed_) {
      return;
    }
    queue_.push_back(std::make_unique<ExchangeTask>(std::move(task)));
  }
  changed_.notify_all();
}

bool ExchangeThread::waitIdle(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!idle()) {
    const std::uint64_t before = ended_;
    if (!waitInterruptibly(changed_, lock, Clock::now() + patience, [&] { return idle() || ended_ != before; })) {
      return false;
    }
  }
  return !failed_;
}

bool ExchangeThread::waitIdleFor(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return idle(); }) && !failed_;
}

void ExchangeThread::discard() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    queue_.clear();
  }
  changed_.notify_all();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
    thread_.join();
  }
}

double ExchangeThread::busyMilliseconds(ExchangeTask::Kind kind) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return busy_ms_[static_cast<int>(kind)];
}

void ExchangeThread::loop() {
  at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard on_stream = stream_.enter();
  while (std::unique_ptr<ExchangeTask> task = next()) {
    try {
      run(*task);
      sending_.push_back(std::move(task));
      if (!begun_ && queueEmpty()) {
        drainAll();
      }
    } catch (...) {
      on_error_(std::current_exception());
      begun_ = nullptr;
      sending_.clear();
      std::lock_guard<std::mutex> lock(mutex_);
      failed_ = true;
      queue_.clear();
    }
  }
}

// The next task, begun; null at the end.
std::unique_ptr<ExchangeTask> ExchangeThread::next() {
  if (begun_) {
    return std::move(begun_);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  running_ = false;
  changed_.notify_all();
  changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
  if (queue_.empty()) {
    return nullptr;
  }
  running_ = true;
  std::unique_ptr<ExchangeTask> task = std::move(queue_.front());
  queue_.pop_front();
  return task;
}

bool ExchangeThread::queueEmpty() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty();
}

void ExchangeThread::begin(ExchangeTask& task) {
  stream_.after(task.posted);
  if (task.before) {
    task.before();
  }
  task.operation->begin();
  faultPoint(FaultPoint::kExchangeBegun);
  task.begun = true;
}

void ExchangeThread::run(ExchangeTask& task) {
  RECORD_FUNCTION(rangeName(task.kind), std::vector<c10::IValue>{});
  const auto start = Clock::now();
  if (!task.begun) {
    drainAll();  // it may use the buffer of what has just been sent
    begin(task);
  }
  task.operation->finish([&] { beginNext(task.kind); });
  faultPoint(FaultPoint::kExchangeArrived);
  if (task.unpack) {
    task.unpack();
  }
  stream_.synchronize();
  task.arrived();
  // What was sent before this exchange has most likely left by now.
  drainAll();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++ended_;
    busy_ms_[static_cast<int>(task.kind)] += millisecondsSince(start);
  }
  changed_.notify_all();
}

// An exchange of the other kind may use buffers that are still being sent: no look ahead there.
void ExchangeThread::beginNext(ExchangeTask::Kind current) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || queue_.front()->kind != current) {
      return;
    }
    begun_ = std::move(queue_.front());
    queue_.pop_front();
  }
  begin(*begun_);
}

void ExchangeThread::drainAll() {
  while (!sending_.empty()) {
    sending_.front()->operation->drain();
    sending_.pop_front();
  }
}

}  // namespace torchext
