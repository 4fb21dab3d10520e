// GroupProgress: where a rank is in its group's collectives, and the sentences that say where others are.
//
// Threads: everything from any thread, without locks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/fault/heartbeat.h"

namespace torchext {

// "5.2 s"
std::string secondsOf(std::chrono::duration<double> time);
// As users call it: "all_reduce".
const char* opName(c10d::OpType type);
// "all_reduce #41"; "no collective" before the first.
std::string describe(const core::Progress& progress);

class GroupProgress {
 public:
  void started(c10d::OpType type, std::uint64_t sequence);
  void completed() { completed_.fetch_add(1, std::memory_order_relaxed); }
  core::Progress now() const;

  // "rank 2 has been silent for 5.2 s; it is at all_reduce #41, rank 1 at all_reduce #42"
  std::string ofSilence(int rank, std::chrono::duration<double> silence, const core::Progress& last,
                        int observer) const;
  // "rank 2 has not called all_reduce #42, its last call is all_reduce #41, 30.1 s ago"
  static std::string ofLaggard(const core::LaggardQuery& query, const char* op);

 private:
  std::atomic<std::uint64_t> started_{0};
  std::atomic<std::uint64_t> completed_{0};
  std::atomic<std::uint32_t> kind_{static_cast<std::uint32_t>(c10d::OpType::UNKNOWN)};
  std::atomic<std::int64_t> since_{0};  // ns of the steady clock at the last call
};

}  // namespace torchext
