// Fault points: named places where a test lets this process fail, so that it fails there and nowhere else.
//
// A test arms a point in one process; when that process has passed the point often enough it is killed there, stopped,
// or an exception is thrown. Where a fault falls is then part of the test and not of the machine's speed: between a
// header and its data, say, or between the list of those that go on and their group.
//
// Only armFaultPoint() turns a point on: no option, no variable of the environment, no message. Off, a point costs a
// relaxed load. One point at a time is armed in a process; from any thread.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace torchext {

enum class FaultPoint {
  // A collective that was not predicted: its header is out; all ranks have agreed on it. Any: the inner backend has it.
  kCallAsked,
  kCallAgreed,
  kCallStarted,
  // A partial all-reduce: the headers of all members have come; over the ring, half of the way is done; over shared
  // memory, the first piece is written.
  kSubsetHeaders,
  kSubsetHalfway,
  kWindowWritten,
  // Prague's generator, on rank 0: a request has come; its groups have gone out.
  kGeneratorAsked,
  kGeneratorAnswered,
  // A bucket of a group's average: packed; added up over the group, and not yet in the parameters.
  kAveragePacked,
  kAverageReduced,
  // Hop: the own model is on its way; those of the neighbours have been taken.
  kHopPublished,
  kHopTaken,
  // Dear's exchanges: begun; arrived, and not yet unpacked.
  kExchangeBegun,
  kExchangeArrived,
  // An exact average of all replicas, before a bucket.
  kExactAverage,
  // Parameters have been averaged, and the optimizer's state has not.
  kAveragedState,
  // A fault message has come, and has not been passed on.
  kFaultMessageHeard,
  // Going on without the dead: this worker has said that it lives; the list of those that go on stands; they have come
  // to the new group; they are connected; the group stands.
  kMembershipAlive,
  kMembershipListed,
  kGroupArrived,
  kGroupConnected,
  kGroupFormed,
  // What a newcomer gets: its size has gone out, or come.
  kStateTransferSending,
  kStateTransferReceiving,
};

namespace detail {

inline constexpr int kNoFaultPoint = -1;
inline std::atomic<int> armed_fault_point{kNoFaultPoint};

void passArmedFaultPoint(FaultPoint point);

}  // namespace detail

// Passes the point: kills or stops this process, or throws std::runtime_error, if it is armed.
inline void faultPoint(FaultPoint point) {
  if (detail::armed_fault_point.load(std::memory_order_relaxed) == static_cast<int>(point)) {
    detail::passArmedFaultPoint(point);
  }
}
// The same, by name, for those in Python. std::invalid_argument when there is none.
void faultPoint(const std::string& name);

// action: "kill" (SIGKILL), "stop" (SIGSTOP) or "throw", once, when the point has been passed `passes` times before;
// it is disarmed then. std::invalid_argument on an unknown name or action, or negative passes.
void armFaultPoint(const std::string& name, const std::string& action, int passes);
std::vector<std::string> faultPointNames();

}  // namespace torchext
