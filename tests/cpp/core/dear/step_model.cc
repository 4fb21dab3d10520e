#include "step_model.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/base/check.h"

namespace torchext::core::testing {

GatherSchedule gatherSchedule(const BucketPlan& plan, const std::vector<std::vector<int>>& tensors_of_call) {
  GatherSchedule schedule;
  std::vector<bool> ordered(index(plan.bucketCount()), false);
  const auto append = [&](int bucket) {
    if (!ordered[index(bucket)]) {
      ordered[index(bucket)] = true;
      schedule.order.push_back(bucket);
    }
  };
  for (const auto& tensors : tensors_of_call) {
    std::vector<int> buckets;
    for (const int tensor : tensors) {
      buckets.push_back(plan.bucketOf(tensor));
      append(buckets.back());
    }
    std::sort(buckets.begin(), buckets.end());
    buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
    schedule.waits_for.push_back(std::move(buckets));
  }
  for (int bucket = 0; bucket < plan.bucketCount(); ++bucket) {
    append(bucket);
  }
  return schedule;
}

double reduceScatterEnd(const BucketPlan& plan, const std::vector<double>& ready, const AlphaBeta& cost) {
  double finish = 0;
  for (int i = 0; i < plan.bucketCount(); ++i) {
    const Bucket& bucket = plan.bucket(i);
    finish = std::max(finish, ready[index(bucket.first + bucket.count - 1)]) + cost.seconds(bucket.bytes);
  }
  return finish;
}

StepTimes predictStep(const BucketPlan& plan, const StepModel& model) {
  StepTimes times;
  times.reduce_scatter_end = reduceScatterEnd(plan, model.ready, model.reduce_scatter);
  const GatherSchedule schedule = gatherSchedule(plan, model.forward_tensors);
  const double start = std::max(model.backward_seconds, times.reduce_scatter_end);
  std::vector<double> complete(index(plan.bucketCount()));
  times.all_gather_end = start;
  for (const int bucket : schedule.order) {
    times.all_gather_end += model.all_gather.seconds(plan.bucket(bucket).bytes);
    complete[index(bucket)] = times.all_gather_end;
  }
  times.forward_end = start;
  for (std::size_t call = 0; call < schedule.waits_for.size(); ++call) {
    for (const int bucket : schedule.waits_for[call]) {
      times.forward_end = std::max(times.forward_end, complete[index(bucket)]);
    }
    times.forward_end += model.forward_seconds[call];
  }
  return times;
}

OptimalFusion optimalFusion(const std::vector<std::size_t>& tensor_bytes, const std::vector<double>& ready,
                            const AlphaBeta& cost) {
  const int tensors = static_cast<int>(tensor_bytes.size());
  // finish[e]: the first e tensors reduced; begin[e]: where the last bucket of that optimum begins.
  std::vector<double> finish(index(tensors + 1), 0.0);
  std::vector<int> begin(index(tensors + 1), 0);
  for (int end = 1; end <= tensors; ++end) {
    double best = std::numeric_limits<double>::infinity();
    std::size_t bytes = 0;
    for (int first = end - 1; first >= 0; --first) {
      bytes += tensor_bytes[index(first)];
      const double candidate = std::max(ready[index(end - 1)], finish[index(first)]) + cost.seconds(bytes);
      if (candidate <= best) {
        best = candidate;
        begin[index(end)] = first;
      }
    }
    finish[index(end)] = best;
  }
  // Backwards, each bucket as large as the deadline that the buckets after it leave allows: most buckets have slack,
  // and a start-up saved here is one saved in the all-gathers. begin[] always meets the deadline, but for rounding.
  std::vector<int> ends;
  double deadline = finish.back();
  for (int end = tensors; end > 0;) {
    ends.push_back(end);
    int chosen = begin[index(end)];
    double seconds = 0;
    std::size_t bytes = 0;
    for (int first = end - 1; first >= 0; --first) {
      bytes += tensor_bytes[index(first)];
      const double own = cost.seconds(bytes);
      if (first == begin[index(end)] ||
          (first < chosen && std::max(ready[index(end - 1)], finish[index(first)]) + own <= deadline)) {
        chosen = first;
        seconds = own;
      }
    }
    deadline -= seconds;
    end = chosen;
  }
  std::reverse(ends.begin(), ends.end());
  return OptimalFusion{BucketPlan::fromEnds(tensor_bytes, ends), finish.back()};
}

}  // namespace torchext::core::testing
