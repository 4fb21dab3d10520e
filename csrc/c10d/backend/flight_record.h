// FlightLog records what a group of ours does beyond collectives in torch's flight recorder.
//
// Torch records the collectives that are called through torch.distributed. The averages of attached models, the
// exchanges behind them and partial_all_reduce do not come by there: they are recorded here, into the recorder of the
// same backend, so that one dump shows both. An operation that hangs or fails stays "scheduled".
//
// An entry, such that torch.distributed.flight_recorder can analyse a dump
//   profiling_name  "prague:partial_all_reduce:all_reduce 0,2": backend, operation, the collective that it is like, and
//                   the members where they are a part of the group. The analyser takes the word after the last colon
//                   for the kind of call, and gives up where it does not know that.
//   process_group   ("0/partial_all_reduce 0,2", "default_pg"): the group's name with the operation, and its
//                   description as it is. The analyser pairs entries of one name by their sequence numbers, which are
//                   therefore each operation's own; the dump's pg_config has the members' global ranks.
//   sequence        1, 2, ... for each such name.
//
// Threads: begin() is for threads of the user. It captures a traceback, for which it takes the GIL: never call it from
// a thread of ours, in a hook of the backward pass, or under a lock that somebody with the GIL may wait for. done() is
// for any thread, and takes no GIL.
// Both do nothing under TORCH_FR_BUFFER_SIZE=0, and with a torch that has no recorder for each backend (before 2.15).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace c10d {
template <typename EventType>
struct FlightRecorder;
}

namespace torchext {

// One entry. Recorders are never destroyed, so that it may outlive its group.
class FlightRecord {
 public:
  // Completed, and how long it took. Nothing the second time, or where nothing was recorded.
  void done();
  bool open() const { return recorder_ != nullptr; }

 private:
  friend class FlightLog;

  c10d::FlightRecorder<c10::Event>* recorder_ = nullptr;
  std::size_t id_ = 0;
  std::size_t epoch_ = 0;
  std::chrono::steady_clock::time_point start_;
};

class FlightLog {
 public:
  explicit FlightLog(c10d::Backend& group);

  // like: a collective that torch's analyser knows; it compares the sizes. Of the tensors nothing else is taken.
  // members: ranks of the group, sorted; none: all of them.
  FlightRecord begin(const std::string& operation, const char* like, const std::vector<at::Tensor>& inputs,
                     const std::vector<at::Tensor>& outputs, const std::vector<int>& members = {});

 private:
  c10d::Backend& group_;
  c10d::FlightRecorder<c10::Event>* const recorder_;
  std::mutex mutex_;                              // guards what follows
  std::map<std::string, std::uint64_t> numbers_;  // the last of each name
};

}  // namespace torchext
