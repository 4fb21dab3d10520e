#include "ddp/averaging/generator_service.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "c10d/fault/failure_monitor.h"
#include "c10d/fault/fault_points.h"
#include "c10d/fault/parse_message.h"
#include "c10d/threads/start_thread.h"
#include "c10d/transport/message_tensor.h"
#include "ddp/averaging/generator_channel.h"

namespace torchext {

GeneratorService::GeneratorService(NotStarted, PointToPoint control, int tag_base,
                                   const core::GeneratorOptions& options, ErrorFunction on_error)
    : control_(std::move(control)),
      tag_base_(tag_base),
      on_error_(std::move(on_error)),
      generator_(core::makeGroupGenerator(options)),
      requests_(static_cast<std::size_t>(options.world_size)),
      outgoing_(static_cast<std::size_t>(options.world_size)) {}

GeneratorService::GeneratorService(PointToPoint control, int tag_base, const core::GeneratorOptions& options,
                                   ErrorFunction on_error)
    : GeneratorService(NotStarted{}, std::move(control), tag_base, options, std::move(on_error)) {
  if (options.world_size > 1) {
    server_ = startThread("tx_generator", [this] { serve(); });
    server_id_ = server_.get_id();
    timer_ = startThread("tx_gen_timer", [this] { watchDeadlines(); });
    timer_id_ = timer_.get_id();
  }
}

GeneratorService::~GeneratorService() {
  stop("the group generator was shut down");
  control_.keep(pending_receive_);
  for (const auto& works : outgoing_) {
    std::for_each(works.begin(), works.end(), [&](const auto& work) { control_.keep(work); });
  }
}

void GeneratorService::stop(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_) {
      stopped_ = true;
      reason_ = reason;
    }
    if (pending_receive_) {
      pending_receive_->abort();
    }
    changed_.notify_all();
  }
  // A thread of ours may call stop() through a failure callback: it must not join itself, nor wait for whoever joins
  // it.
  const auto self = std::this_thread::get_id();
  if (self == server_id_ || self == timer_id_) {
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !joining_; });
  joining_ = true;
  lock.unlock();
  for (std::thread* thread : {&server_, &timer_}) {
    if (thread->joinable()) {
      thread->join();
    }
  }
  lock.lock();
  joining_ = false;
  changed_.notify_all();
}

double GeneratorService::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void GeneratorService::serve() {
  while (true) {
    const at::Tensor request = emptyMessage(sizeof(GeneratorMessage));
    PointToPoint::WorkPtr receive;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_) {
        return;
      }
      try {
        receive = control_.recvAnySource(request, tag_base_ + kGeneratorRequestTag);
      } catch (const std::exception& error) {
        LOG(WARNING) << "prague: the group generator cannot receive any more: " << error.what();
        return;
      }
      pending_receive_ = receive;
    }
    // Without a time limit: an idle generator is no fault. stop() ends it by aborting the work.
    try {
      if (!receive->wait(FailureMonitor::kForever)) {
        return;
      }
      // Without the lock: what is malformed ends the group, whose callbacks stop this service.
      const auto message = parseOrRefuse(
          [&](const char* error) { return control_.refuse(receive->sourceRank(), kGeneratorName, error); },
          core::parseGeneratorMessage, bytesOfMessage(request), control_.size());
      if (message.kind != GeneratorMessage::kComplete) {
        awaitSent(static_cast<std::size_t>(message.worker));
      }
      std::lock_guard<std::mutex> lock(mutex_);
      pending_receive_ = nullptr;
      faultPoint(FaultPoint::kGeneratorAsked);
      handle(message);
      faultPoint(FaultPoint::kGeneratorAnswered);
    } catch (const std::exception&) {
      breakOff(std::current_exception());
      return;
    }
  }
}

void GeneratorService::watchDeadlines() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    const auto deadline = generator_->nextDeadline();
    if (!deadline) {
      changed_.wait(lock);
    } else if (now() < *deadline) {
      changed_.wait_for(lock, std::chrono::duration<double>(*deadline - now()));
    } else {
      try {
        deliver(generator_->tick(now()));
        changed_.notify_all();
      } catch (const std::exception&) {  // a member has died since it asked
        lock.unlock();
        breakOff(std::current_exception());
        lock.lock();
      }
    }
  }
}

void GeneratorService::breakOff(const std::exception_ptr& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) {
      return;
    }
    stopped_ = true;
    error_ = error;
    changed_.notify_all();
  }
  on_error_(error);  // without the lock: it may end the group, whose callbacks stop this service
}

// A worker asks or pauses only when it has received all that was sent to it, so these waits are over already. It
// completes while deliveries of a drain may still be on their way.
void GeneratorService::awaitSent(std::size_t worker) {
  std::vector<PointToPoint::WorkPtr> sent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sent.swap(outgoing_[worker]);
  }
  try {
    std::for_each(sent.begin(), sent.end(), [](const auto& work) { work->wait(kNoTimeout); });
  } catch (...) {
    std::for_each(sent.begin(), sent.end(), [this](const auto& work) { control_.keep(work); });
    throw;
  }
}

// Rank 0's own messages come here without awaitSent(): nothing is sent to it.
void GeneratorService::handle(const GeneratorMessage& message) {
  const auto worker = static_cast<std::size_t>(message.worker);
  if (message.completed != 0) {
    deliver(generator_->complete(message.worker, message.completed, now()));
  }
  if (message.kind == GeneratorMessage::kAsk) {
    ++requests_[worker];
    deliver(generator_->request(message.worker, now()));
  } else if (message.kind == GeneratorMessage::kPause) {
    deliver(generator_->pause(message.worker, now()));
  } else if (message.kind == GeneratorMessage::kMeet) {
    deliver(generator_->meet(message.worker, now()));
  }
  changed_.notify_all();
}

void GeneratorService::deliver(const std::vector<core::Delivery>& deliveries) {
  const std::int64_t fastest = *std::max_element(requests_.begin(), requests_.end());
  for (const core::Delivery& delivery : deliveries) {
    const auto worker = static_cast<std::size_t>(delivery.worker);
    AssignedGroup group{delivery.group.id, delivery.group.members, fastest - requests_[worker]};
    if (delivery.worker == control_.rank()) {
      local_.push_back(std::move(group));
      continue;
    }
    outgoing_[worker].push_back(
        control_.send(messageOf(core::encodeDelivery(group)), delivery.worker, tag_base_ + kGeneratorDeliveryTag));
  }
}

void GeneratorService::handleLocally(GeneratorMessage message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!stopped_) {
    handle(message);
  }
}

AssignedGroup GeneratorService::awaitLocally(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool arrived = changed_.wait_for(lock, timeout, [this] { return stopped_ || !local_.empty(); });
  if (local_.empty() && error_) {
    std::rethrow_exception(error_);
  }
  if (local_.empty()) {
    C10_THROW_ERROR(DistBackendError, arrived ? reason_
                                              : c10::str("prague: no group from the generator within ", timeout.count(),
                                                         " ms: its workers wait for a peer that has "
                                                         "not asked; is a rank stuck, or training fewer steps?"));
  }
  AssignedGroup group = std::move(local_.front());
  local_.pop_front();
  return group;
}

}  // namespace torchext
