// GeneratorClient asks Prague's group generator for groups, on the part of one worker.
//
// Call order: ask() -> awaitGroup() -> [run it] -> finished() -> ask() ...; pauseAndDrain() between two of them.
// Threads: a client belongs to one thread at a time; ask() may come from another thread than awaitGroup().
// The messages and who answers which: generator_service.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "c10d/threads/outstanding_averages.h"
#include "c10d/transport/point_to_point.h"
#include "core/prague/generator_messages.h"
#include "ddp/averaging/generator_service.h"

namespace torchext {

class GeneratorClient {
 public:
  // service: rank 0's, null elsewhere.
  GeneratorClient(PointToPoint control, int tag_base, std::shared_ptr<GeneratorService> service,
                  std::chrono::milliseconds timeout);
  ~GeneratorClient();
  GeneratorClient(const GeneratorClient&) = delete;
  GeneratorClient& operator=(const GeneratorClient&) = delete;

  // Idempotent until awaitGroup() has returned. While a group is running the question is sent by finished().
  void ask();
  AssignedGroup awaitGroup();
  void finished(std::uint64_t id);
  // Ends with nobody counting on this worker; `run` is called for each group that still names it, in order.
  void pauseAndDrain(WaitingFor what, const std::function<void(const AssignedGroup&)>& run);

 private:
  void awaitSent(std::unique_lock<std::mutex>& lock);
  void sendMessage(GeneratorMessage::Kind kind);
  void sendAsk();
  void postReply();
  AssignedGroup awaitDelivery();

  PointToPoint control_;
  const int tag_base_;
  std::shared_ptr<GeneratorService> service_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // guards everything below
  bool asked_ = false;
  bool running_ = false;         // awaitGroup() has returned, finished() not been called
  std::uint64_t completed_ = 0;  // not yet reported
  at::Tensor reply_;
  PointToPoint::WorkPtr pending_reply_;
  PointToPoint::WorkPtr sent_;
};

}  // namespace torchext
