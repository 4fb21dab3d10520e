// FamilySearch finds the best partition and order of one family, for one number of stages and one data width.
//
// All partitions are tried where they are few (most_partitions). Else a local search starts from the seeds, and from
// its last answer. Deterministic. Not for several threads.
#pragma once

#include <optional>
#include <string>

#include "core/pipeline/order_search.h"

namespace torchext::core {

// Where not all partitions are tried.
enum class SearchEffort {
  kFull,   // a local search from the best of the seeds and the last answer
  kWarm,   // from the last answer
  kCheck,  // none: the last partition, and the one that needs the least memory
};

// "4 stages x 2"; "4 stages" of one rank each.
std::string shapeName(int stages, int data);

// What fits in the least memory: at depth 1, or with gpipe all micro-batches in flight.
struct LeastMemory {
  double bytes = 0;
  int stage = 0;  // that needs it
  int first = 0;  // its layers
  int last = 0;
};

class FamilySearch {
 public:
  // costs and options outlive it. There are as many layers as stages, or more. microbatches: of one replica.
  FamilySearch(const StageCosts& costs, const PipelineOptions& options, OrderFamily family, int stages, int data,
               int microbatches);

  // None: nothing fits, or nothing is as fast as `below`.
  std::optional<StageOrder> best(double memory_bytes, double below, SearchEffort effort);
  LeastMemory leastMemory() const;
  bool exhaustive() const { return exhaustive_; }

  OrderFamily family() const { return family_; }
  int stages() const { return stages_; }
  int data() const { return data_; }
  int microbatches() const { return microbatches_; }
  std::string shape() const;  // shapeName
  const StageCosts& costs() const { return costs_; }
  OrderSearch& orders() { return orders_; }

 private:
  void climb(std::optional<StageOrder>& best, const StageSizes& start, double memory_bytes, double below);
  void tryAll(std::optional<StageOrder>& best, double memory_bytes, double below);

  const StageCosts& costs_;
  const PipelineOptions& options_;
  OrderFamily family_;
  int stages_;
  int data_;
  int microbatches_;
  bool exhaustive_;
  OrderSearch orders_;
  StageSizes last_;  // the last answer
};

}  // namespace torchext::core
