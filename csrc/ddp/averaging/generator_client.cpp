#include "ddp/averaging/generator_client.h"

#include <cstddef>
#include <span>
#include <utility>

#include <c10/util/Exception.h>

#include "c10d/fault/parse_message.h"
#include "c10d/transport/message_tensor.h"
#include "ddp/averaging/generator_channel.h"

namespace torchext {

GeneratorClient::GeneratorClient(PointToPoint control, int tag_base, std::shared_ptr<GeneratorService> service,
                                 std::chrono::milliseconds timeout)
    : control_(std::move(control)), tag_base_(tag_base), service_(std::move(service)), timeout_(timeout) {}

GeneratorClient::~GeneratorClient() {
  control_.keep(pending_reply_);
  control_.keep(sent_);
}

void GeneratorClient::ask() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!asked_) {
    awaitSent(lock);
  }
  if (asked_) {
    return;
  }
  asked_ = true;
  if (!running_) {
    sendAsk();
  }
}

void GeneratorClient::sendAsk() {
  postReply();
  sendMessage(GeneratorMessage::kAsk);
}

AssignedGroup GeneratorClient::awaitGroup() {
  ask();
  AssignedGroup group = awaitDelivery();
  std::lock_guard<std::mutex> lock(mutex_);
  asked_ = false;
  running_ = true;
  return group;
}

void GeneratorClient::finished(std::uint64_t id) {
  std::unique_lock<std::mutex> lock(mutex_);
  awaitSent(lock);
  completed_ = id;
  running_ = false;
  if (asked_) {
    sendAsk();
  } else {
    // At once, though the next question would carry it: the slowdown filter reads step times off these messages.
    sendMessage(GeneratorMessage::kComplete);
  }
}

void GeneratorClient::pauseAndDrain(WaitingFor what, const std::function<void(const AssignedGroup&)>& run) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    awaitSent(lock);
    TORCH_INTERNAL_ASSERT(!asked_, "pauseAndDrain with a request in flight");
    postReply();
    sendMessage(what == WaitingFor::kEverybody ? GeneratorMessage::kMeet : GeneratorMessage::kPause);
  }
  while (true) {
    const AssignedGroup group = awaitDelivery();
    if (group.id == 0) {
      return;
    }
    {
      // Posted before the group runs: the next delivery is on its way already.
      std::lock_guard<std::mutex> lock(mutex_);
      postReply();
    }
    run(group);
    std::unique_lock<std::mutex> lock(mutex_);
    awaitSent(lock);
    completed_ = group.id;
    sendMessage(GeneratorMessage::kComplete);
  }
}

// Before a message: until the one before has left. Without the lock, so that nobody else waits for the service here.
void GeneratorClient::awaitSent(std::unique_lock<std::mutex>& lock) {
  while (const auto sent = std::exchange(sent_, nullptr)) {
    lock.unlock();
    try {
      control_.wait(sent, 0, kGeneratorName);
    } catch (...) {
      control_.keep(sent);
      throw;
    }
    lock.lock();
  }
}

void GeneratorClient::sendMessage(GeneratorMessage::Kind kind) {
  GeneratorMessage message;
  message.kind = kind;
  message.worker = control_.rank();
  message.completed = std::exchange(completed_, 0);
  if (service_) {
    service_->handleLocally(message);
  } else {
    sent_ = control_.send(messageOf(std::as_bytes(std::span(&message, 1))), 0, tag_base_ + kGeneratorRequestTag);
  }
}

void GeneratorClient::postReply() {
  if (!service_) {
    reply_ = emptyMessage(core::deliveryBytes(static_cast<std::size_t>(control_.size())));
    pending_reply_ = control_.recv(reply_, 0, tag_base_ + kGeneratorDeliveryTag);
  }
}

AssignedGroup GeneratorClient::awaitDelivery() {
  if (service_) {
    return service_->awaitLocally(timeout_);
  }
  PointToPoint::WorkPtr work;
  at::Tensor reply;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work = std::exchange(pending_reply_, nullptr);
    reply = reply_;
  }
  try {
    control_.wait(work, 0, kGeneratorName);
  } catch (...) {
    control_.keep(work);
    throw;
  }
  return parseOrRefuse([&](const char* error) { return control_.refuse(0, kGeneratorName, error); },
                       core::parseDelivery, bytesOfMessage(reply), control_.size(), control_.rank());
}

}  // namespace torchext
