// LinkCalibration measures how long the operations of a group take, at sizes that grow: the tables of torchext.auto.
//
// What is timed. A buffer of S bytes is all-reduced by the group itself, reduce-scattered and gathered by a
// ShardTransport as dear does it, or by several, and sent to the next rank while one comes from the rank before (p2p).
// Equal rows that make S bytes together are gathered by the group (rows).
//
// How a time is taken. After a barrier, calls follow each other until kStreamBytes have been sent or kStream has
// passed, at most kMostCalls, and their mean counts. In training, too, one message follows another: a message alone
// would pass on what a switch's queues and a rate limiter's saved-up tokens take at once, and short ones would seem
// faster than the link.
//
// How many. Sizes grow fourfold from 4 KiB on, until a call takes kLongCall or S is kMostBytes. The largest are dropped
// where kRepeats of each would take more than `max_seconds`; two sizes are always measured. What a size will take is
// forecast from the line through the two before it, for short messages take as long as shorter ones. Repeats go in turn
// over all sizes and operations, so that a disturbance hits all alike. There are more than kRepeats where time is left.
//
// What is reported. Seconds are the maximum over ranks of a rank's median. The spread compares the medians of odd and
// of even repeats: how well two calibrations, one between the other's, agree.
//
// Agreement: collective. All ranks decide by figures that are maxima over ranks, so they measure the same sizes.
// Threads: run() blocks, on one thread; it neither needs nor takes the interpreter lock. Waits have the group's
// timeout.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/transport/point_to_point.h"
#include "c10d/transport/shard_transport.h"

namespace torchext {

// Of one operation, sizes ascending. `bytes` is S; of "rows" it is the bytes of one rank's rows.
struct LinkTable {
  std::string operation;
  std::vector<std::int64_t> bytes = {};
  std::vector<double> seconds = {};
  double spread = 0.0;  // 0.04: 4 %
};

struct LinkMeasurement {
  std::vector<LinkTable> tables = {};
  std::vector<int> host_of = {};       // of each rank, dense
  double copy_bytes_per_second = 0.0;  // into a flat buffer; on the slowest rank, while all copy
  double operations_per_second = 0.0;  // of a matrix product, 2 M N K of them; likewise
  double elapsed_seconds = 0.0;
};

class LinkCalibration {
 public:
  static constexpr std::int64_t kFirstBytes = 1 << 12;
  static constexpr std::int64_t kMostBytes = 1 << 24;
  static constexpr std::int64_t kGrowth = 4;
  static constexpr std::chrono::milliseconds kLongCall{250};
  static constexpr std::int64_t kStreamBytes = 1 << 22;
  static constexpr std::chrono::milliseconds kStream{100};
  static constexpr std::int64_t kMostCalls = 3;
  static constexpr int kFirstRepeats = 2;
  static constexpr int kRepeats = 5;
  static constexpr int kMostRepeats = 15;

  struct Shards {
    std::string suffix;  // of its operations' names
    std::unique_ptr<ShardTransport> transport;
  };

  // group: for tensors on `device`. transport: null where there is none, as on CUDA; p2p is left out then. tag: one of
  // its tags. shards: both operations of each are measured. max_seconds: since the start.
  LinkCalibration(c10::intrusive_ptr<c10d::Backend> group, c10::Device device, std::optional<PointToPoint> transport,
                  int tag, std::vector<Shards> shards, double max_seconds,
                  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now());

  // Once. Errors are those of the group and of the transports.
  LinkMeasurement run();

 private:
  struct Size {
    std::int64_t bytes;
    double estimate;         // seconds of a call when it was first timed, the same on all ranks
    std::int64_t calls = 1;  // that follow each other
    std::vector<double> samples = {};
  };
  struct Operation {
    std::string name;
    std::function<void(const at::Tensor& buffer)> call;
    bool growing = true;
    std::vector<Size> sizes = {};
  };

  void addOperations();
  void sendToNext(const at::Tensor& buffer);
  void grow();
  void repeat();
  std::vector<LinkTable> tables();
  void timeMachine(LinkMeasurement& result);

  void synchronize() const;
  void barrier();
  // Seconds of a call with the size that follows those measured.
  static double forecast(const Operation& operation);
  static std::int64_t callsOf(std::int64_t bytes, double seconds);
  double timeOf(const Operation& operation, std::int64_t bytes, std::int64_t calls);
  at::Tensor bufferOf(std::int64_t bytes) const;
  // The largest of each over all ranks. Collective.
  std::vector<double> largest(const std::vector<double>& own);
  double elapsed() const;
  double estimateOfRound() const;

  const c10::intrusive_ptr<c10d::Backend> group_;
  const c10::Device device_;
  const std::optional<PointToPoint> transport_;
  const int tag_;
  const std::vector<Shards> shards_;
  const double max_seconds_;
  const std::chrono::steady_clock::time_point start_;
  at::Tensor memory_;    // what is sent
  at::Tensor received_;  // what else arrives
  std::vector<Operation> operations_;
};

// A transport over a group that is none of ours, for messages and waits for them alone: these have the group's timeout,
// and a failure is its own error.
PointToPoint transportOf(const c10::intrusive_ptr<c10d::Backend>& group);

}  // namespace torchext
