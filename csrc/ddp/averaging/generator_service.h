// GeneratorService runs Prague's group generator as a service on the control plane.
//
// The service is two threads in rank 0's process over the control Gloo group, one that receives and one that keeps the
// generator's deadlines; it owns a core::GroupGenerator. A worker's GeneratorClient sends fixed-size messages and
// receives deliveries. Nothing here touches a tensor of the model or the GIL.
//
//   worker w: ASK      "I need a group"                                      -> one DELIVERY, now or later
//             COMPLETE "I have finished group `completed`"
//             PAUSE    "I will ask for nothing for a while"                  -> the groups that still name w, each a
//                      DELIVERY, then one with id 0
//             MEET     the same, in front of a call that all workers make: when all have come to it they come back, and
//                      whoever asks first gets its delivery when the others have asked, too, or take too long
//
// Rank 0's own client calls the service directly: Gloo has no connection to oneself.
// Shutdown: the service ends with stop() (safe twice) or its destructor; bounded, it aborts its own pending receive.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "c10d/transport/point_to_point.h"
#include "core/prague/generator_messages.h"
#include "core/prague/group_generator.h"

namespace torchext {

using core::AssignedGroup;
using core::GeneratorMessage;

class GeneratorService {
 public:
  // Hears of what has ended the service but stop(), on a thread of the service: workers wait for its answers.
  using ErrorFunction = std::function<void(const std::exception_ptr& error)>;

  // control: the control group's transport; tag_base, tag_base + 1 are this service's tags on it.
  GeneratorService(PointToPoint control, int tag_base, const core::GeneratorOptions& options, ErrorFunction on_error);
  ~GeneratorService();
  GeneratorService(const GeneratorService&) = delete;
  GeneratorService& operator=(const GeneratorService&) = delete;

  // Ends the threads and every local wait; `reason` is what a later awaitLocally() throws. The first reason stays.
  void stop(const std::string& reason);

  // Rank 0's own client.
  void handleLocally(GeneratorMessage message);
  AssignedGroup awaitLocally(std::chrono::milliseconds timeout);

 private:
  struct NotStarted {};
  GeneratorService(NotStarted, PointToPoint control, int tag_base, const core::GeneratorOptions& options,
                   ErrorFunction on_error);
  void serve();
  void watchDeadlines();
  void breakOff(const std::exception_ptr& error);
  void awaitSent(std::size_t worker);
  void handle(const GeneratorMessage& message);
  void deliver(const std::vector<core::Delivery>& deliveries);
  double now() const;

  PointToPoint control_;
  const int tag_base_;
  const ErrorFunction on_error_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::unique_ptr<core::GroupGenerator> generator_;
  std::vector<std::int64_t> requests_;
  std::deque<AssignedGroup> local_;
  // A delivery is sent and forgotten; its memory lives until the next message of that worker shows that it has arrived.
  std::vector<std::vector<PointToPoint::WorkPtr>> outgoing_;
  PointToPoint::WorkPtr pending_receive_;
  bool stopped_ = false;
  std::string reason_;        // of stop()
  std::exception_ptr error_;  // or what broke the service
  bool joining_ = false;      // a thread joins those below
  std::thread server_;
  std::thread timer_;
  std::thread::id server_id_;
  std::thread::id timer_id_;
};

}  // namespace torchext
