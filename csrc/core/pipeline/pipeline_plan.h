// planPipeline chooses the stages of a chain of layers, the order of their work and the data-parallel width.
//
//   layers + link + options
//     for each number of stages p that divides the world (data width d = world / p, and d divides the micro-batches)
//       for each family of orders (family_search)
//         partitions (stage_partition) -> limits of depth from memory -> order (order_search) -> seconds
//     -> where ports are shared, each family's best is improved for that (port_search)
//     -> of those within 1 % of the fastest the one with the lowest peak of memory; of equals the faster one
//     -> the plan, what lost and why, and the frontier of memory and time (pipeline_frontier)
// Training stays exact: only who computes what, and when, is chosen. Pure and deterministic, one thread.
//
// All candidates train on the same batch: `microbatches` counts those of one step over all replicas of the pipeline,
// so a plan of data width d runs microbatches / d in each.
#pragma once

#include <string>
#include <vector>

#include "core/pipeline/pipeline_alternatives.h"
#include "core/pipeline/pipeline_frontier.h"
#include "core/pipeline/pipeline_options.h"
#include "core/pipeline/pipeline_profile.h"
#include "core/pipeline/pipeline_table.h"

namespace torchext::core {

struct PlannedStage {
  int first = 0;  // layer
  int last = 0;
  int data = 1;   // ranks that share it
  int depth = 1;  // most micro-batches in flight
  bool recompute = false;
  std::vector<int> bucket_ends;  // StageSync
  double sync_seconds = 0;       // exposed
  double peak_bytes = 0;
};

struct PlannedPipeline {
  std::vector<PlannedStage> stages;
  int microbatches = 1;  // of one replica
  OrderFamily order = OrderFamily::k1F1B;
  PipelineTable table;
  double seconds = 0;  // mode "ideal", as of all alternatives; where ports are shared, as torch runs it
  double bubble = 0;
  bool exhaustive = false;                        // all partitions were tried
  std::vector<PipelineAlternative> alternatives;  // best first
  std::vector<FrontierPoint> frontier;            // memory rises, time falls strictly
};

// std::invalid_argument: bad layers, link or options; memory in which nothing fits, with the least that would, and the
// stage that needs it.
PlannedPipeline planPipeline(const std::vector<PipelineLayer>& layers, const PipelineLink& link,
                             const PipelineOptions& options);

// The stages of a plan, or of any partition, as simulateTable takes them. sizes: layers of each stage; recompute: of
// each stage, or none.
std::vector<StageTimes> stageTimes(const std::vector<PipelineLayer>& layers, const PipelineLink& link,
                                   const PipelineOptions& options, const std::vector<int>& sizes,
                                   const std::vector<bool>& recompute = {});

}  // namespace torchext::core
