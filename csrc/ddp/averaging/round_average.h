// RoundAverage averages a model within the group of a round, bucket by bucket.
//
// atc  average() packs each bucket, has it added up, and writes the mean into the model.
// cta  begin() copies the buffers, which the next forward changes; average() packs the parameters, which the next step
//      changes. The mean stays in the buckets until apply(): a buffer's is corrected by what the forward added there,
//      and a parameter that the user has written keeps that (TensorsInPlace). defer() makes room in the buckets before.
//
// Threads: average() is the averaging thread's alone. The others take turns with it and with each other: the owner's
// lock keeps them apart, and the owner waits for a round before it applies it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "ddp/averaging/deferred_average.h"
#include "ddp/averaging/group_reducer.h"
#include "ddp/averaging/group_source.h"
#include "ddp/averaging/model_buckets.h"
#include "ddp/averaging/pending_buckets.h"
#include "ddp/averaging/shared_stats.h"
#include "ddp/common/tensors_in_place.h"

namespace torchext {

class RoundAverage {
 public:
  // All but combine_then_adapt, which is cta, outlive this object.
  RoundAverage(bool combine_then_adapt, const ModelBuckets& buckets, TensorsInPlace& tensors, GroupReducer& reducer,
               PendingBuckets& pending, SharedStats& stats)
      : combine_then_adapt_(combine_then_adapt),
        buckets_(buckets),
        tensors_(tensors),
        reducer_(reducer),
        pending_(pending),
        stats_(stats) {}

  // The step is taken: what is written from here on is not the optimizer's.
  void begin();
  // With the group. atc: releases each bucket but the last, which closes the round, once the model holds its mean.
  void average(const AssignedGroup& group);
  // cta: the model becomes the average that waits in the buckets, if one does.
  void apply();
  // cta: turns it into a difference, as a deferred average is about to use the buckets.
  void defer(DeferredAverage& deferred);

 private:
  void averageBucket(std::size_t index, const AssignedGroup& group);
  void packToKeep(std::size_t index);
  at::Tensor differenceOf(std::size_t index, const at::Tensor& mean) const;
  void applyCorrected(std::size_t index, const at::Tensor& mean, const std::vector<Write>& writes);

  const bool combine_then_adapt_;
  const ModelBuckets& buckets_;
  TensorsInPlace& tensors_;
  GroupReducer& reducer_;
  PendingBuckets& pending_;
  SharedStats& stats_;
  // cta, by bucket: what was packed; of parameters only where they may be written.
  std::vector<at::Tensor> before_;
  std::int64_t waiting_members_ = 0;  // cta: of the average that waits to be applied; 0: none
};

}  // namespace torchext
