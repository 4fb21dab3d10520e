#include "bucket_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "check.h"

namespace torchext::core {
namespace {

int countOf(const auto& container) { return static_cast<int>(container.size()); }

void checkSeconds(const char* name, double value) {
  if (!std::isfinite(value) || value < 0) {
    throwInvalid(name, value, "finite, 0 or more");
  }
}

void checkCost(const AlphaBeta& cost) {
  checkSeconds("alpha", cost.alpha);
  checkSeconds("beta", cost.beta);
}

void checkReady(const std::vector<double>& ready, int tensors) {
  if (countOf(ready) != tensors) {
    throwInvalid("size of ready", ready.size(), concat(tensors, ", one a tensor"));
  }
  double before = 0;
  for (const double value : ready) {
    if (!std::isfinite(value) || value < before) {
      throwInvalid("ready", value, concat("finite, ", before, " (the tensor before it) or more"));
    }
    before = value;
  }
}

}  // namespace

BucketPlan::BucketPlan(std::vector<std::size_t> tensor_bytes) : tensor_bytes_(std::move(tensor_bytes)) {
  if (tensor_bytes_.empty()) {
    throwInvalid("number of tensors", 0, "1 or more");
  }
  bucket_of_.reserve(tensor_bytes_.size());
  offset_bytes_.reserve(tensor_bytes_.size());
}

BucketPlan::BucketPlan(std::vector<std::size_t> tensor_bytes, std::size_t limit_bytes)
    : BucketPlan(std::move(tensor_bytes)) {
  if (limit_bytes == 0) {
    throwInvalid("limit_bytes", limit_bytes, "1 or more");
  }
  std::size_t bytes = 0;
  for (int tensor = 0; tensor < tensorCount(); ++tensor) {
    const std::size_t own = tensor_bytes_[index(tensor)];
    // Written as a difference: a sum could wrap.
    const bool first = countOf(bucket_of_) == tensor;
    if (!first && (own > limit_bytes || bytes > limit_bytes - own)) {
      addBucket(tensor);
      bytes = 0;
    }
    bytes += own;
  }
  addBucket(tensorCount());
}

BucketPlan BucketPlan::fromEnds(std::vector<std::size_t> tensor_bytes, const std::vector<int>& ends) {
  BucketPlan plan(std::move(tensor_bytes));
  for (const int end : ends) {
    const int begin = countOf(plan.bucket_of_);
    if (end <= begin || end > plan.tensorCount()) {
      throwInvalid("end of a bucket", end, concat(begin + 1, "..", plan.tensorCount()));
    }
    plan.addBucket(end);
  }
  if (countOf(plan.bucket_of_) != plan.tensorCount()) {
    throwInvalid("end of the last bucket", plan.bucket_of_.size(), concat(plan.tensorCount(), ", the tensors"));
  }
  return plan;
}

// Tensors up to end that are in no bucket yet become one.
void BucketPlan::addBucket(int end) {
  Bucket bucket{countOf(bucket_of_), 0, 0};
  bucket.count = end - bucket.first;
  for (int tensor = bucket.first; tensor < end; ++tensor) {
    bucket_of_.push_back(bucketCount());
    offset_bytes_.push_back(bucket.bytes);
    bucket.bytes += tensor_bytes_[index(tensor)];
  }
  buckets_.push_back(bucket);
}

const Bucket& BucketPlan::bucket(int bucket) const {
  checkIndex("bucket", bucket, bucketCount());
  return buckets_[index(bucket)];
}

int BucketPlan::bucketOf(int tensor) const {
  checkIndex("tensor", tensor, tensorCount());
  return bucket_of_[index(tensor)];
}

std::size_t BucketPlan::offsetBytes(int tensor) const {
  checkIndex("tensor", tensor, tensorCount());
  return offset_bytes_[index(tensor)];
}

std::size_t BucketPlan::tensorBytes(int tensor) const {
  checkIndex("tensor", tensor, tensorCount());
  return tensor_bytes_[index(tensor)];
}

std::size_t BucketPlan::totalBytes() const {
  return std::accumulate(tensor_bytes_.begin(), tensor_bytes_.end(), std::size_t{0});
}

std::size_t BucketPlan::meanBucketBytes() const {
  const std::size_t count = buckets_.size();
  return totalBytes() / count + (totalBytes() % count == 0 ? 0 : 1);
}

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
  checkCost(cost);
  checkReady(ready, plan.tensorCount());
  double finish = 0;
  for (int i = 0; i < plan.bucketCount(); ++i) {
    const Bucket& bucket = plan.bucket(i);
    finish = std::max(finish, ready[index(bucket.first + bucket.count - 1)]) + cost.seconds(bucket.bytes);
  }
  return finish;
}

StepTimes predictStep(const BucketPlan& plan, const StepModel& model) {
  checkCost(model.all_gather);
  if (model.forward_seconds.size() != model.forward_tensors.size()) {
    throwInvalid("size of forward_seconds", model.forward_seconds.size(),
                 concat(model.forward_tensors.size(), ", that of forward_tensors"));
  }
  StepTimes times;
  times.reduce_scatter_end = reduceScatterEnd(plan, model.ready, model.reduce_scatter);
  if (!std::isfinite(model.backward_seconds) || model.backward_seconds < model.ready.back()) {
    throwInvalid("backward_seconds", model.backward_seconds, concat("finite, ", model.ready.back(), " or more"));
  }
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
    checkSeconds("forward_seconds", model.forward_seconds[call]);
    for (const int bucket : schedule.waits_for[call]) {
      times.forward_end = std::max(times.forward_end, complete[index(bucket)]);
    }
    times.forward_end += model.forward_seconds[call];
  }
  return times;
}

OptimalFusion optimalFusion(const std::vector<std::size_t>& tensor_bytes, const std::vector<double>& ready,
                            const AlphaBeta& cost) {
  checkCost(cost);
  const int tensors = countOf(tensor_bytes);
  checkReady(ready, tensors);
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

}  // namespace torchext::core
