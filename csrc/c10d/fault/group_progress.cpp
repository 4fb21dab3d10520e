#include "c10d/fault/group_progress.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include <c10/util/StringUtil.h>

namespace torchext {
namespace {

std::int64_t nowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string secondsOf(std::chrono::duration<double> time) {
  std::array<char, 32> text{};
  static_cast<void>(std::snprintf(text.data(), text.size(), "%.1f s", time.count()));
  return text.data();
}

const char* opName(c10d::OpType type) {
  using c10d::OpType;
  switch (type) {
    case OpType::BROADCAST:
      return "broadcast";
    case OpType::ALLREDUCE:
      return "all_reduce";
    case OpType::ALLREDUCE_COALESCED:
      return "all_reduce_coalesced";
    case OpType::REDUCE:
      return "reduce";
    case OpType::ALLGATHER:
      return "all_gather";
    case OpType::_ALLGATHER_BASE:
      return "all_gather_single";
    case OpType::ALLGATHER_COALESCED:
      return "all_gather_coalesced";
    case OpType::GATHER:
      return "gather";
    case OpType::SCATTER:
      return "scatter";
    case OpType::REDUCE_SCATTER:
      return "reduce_scatter";
    case OpType::_REDUCE_SCATTER_BASE:
      return "reduce_scatter_single";
    case OpType::ALLTOALL_BASE:
      return "all_to_all_single";
    case OpType::ALLTOALL:
      return "all_to_all";
    case OpType::BARRIER:
      return "barrier";
    case OpType::COALESCED:
      return "coalesced";
    case OpType::_ALLREDUCE_SPARSE:
      return "all_reduce_sparse";
    default:
      return "collective";
  }
}

std::string describe(const core::Progress& progress) {
  return progress.started == 0 ? "no collective"
                               : c10::str(opName(static_cast<c10d::OpType>(progress.kind)), " #", progress.started);
}

void GroupProgress::started(c10d::OpType type, std::uint64_t sequence) {
  started_.store(sequence, std::memory_order_relaxed);
  kind_.store(static_cast<std::uint32_t>(type), std::memory_order_relaxed);
  since_.store(nowNs(), std::memory_order_relaxed);
}

core::Progress GroupProgress::now() const {
  core::Progress progress;
  progress.started = started_.load(std::memory_order_relaxed);
  progress.completed = completed_.load(std::memory_order_relaxed);
  progress.kind = kind_.load(std::memory_order_relaxed);
  const std::int64_t since = since_.load(std::memory_order_relaxed);
  if (since > 0) {
    const std::int64_t idle = (nowNs() - since) / 1'000'000;
    constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();
    progress.idle_ms = static_cast<std::uint32_t>(std::clamp<std::int64_t>(idle, 0, kMost));
  }
  return progress;
}

std::string GroupProgress::ofSilence(int rank, std::chrono::duration<double> silence, const core::Progress& last,
                                     int observer) const {
  return c10::str("rank ", rank, " has been silent for ", secondsOf(silence), "; it is at ", describe(last), ", rank ",
                  observer, " at ", describe(now()));
}

std::string GroupProgress::ofLaggard(const core::LaggardQuery& query, const char* op) {
  return c10::str(
      "rank ", query.laggard, " has not called ", op, " #", query.sequence, ", its last call is ",
      describe(query.progress),
      query.progress.started > 0 ? ", " + secondsOf(std::chrono::milliseconds(query.progress.idle_ms)) + " ago" : "");
}

}  // namespace torchext
