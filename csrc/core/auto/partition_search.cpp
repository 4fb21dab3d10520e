#include "core/auto/partition_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr int kUniformLimits = 12;  // all bytes over the square root of 2, over 2, ... over 64
constexpr double kBetter = 1e-12;   // relative; less is rounding

class Search {
 public:
  Search(const std::function<double(const EndsByKind&)>& step, int most_simulations)
      : step_(step), left_(most_simulations) {}

  // Keeps it if it is better than what is known; true then.
  bool offer(EndsByKind ends) {
    if (left_ <= 0 && found_.simulations > 0) {
      return false;
    }
    --left_;
    const double seconds = step_(ends);
    const bool better = found_.simulations == 0 || seconds < found_.step_seconds * (1 - kBetter);
    ++found_.simulations;
    if (better) {
      found_.ends = std::move(ends);
      found_.step_seconds = seconds;
    }
    return better;
  }
  bool offer(std::size_t kind, std::vector<int> ends) {
    EndsByKind changed = found_.ends;
    changed[kind] = std::move(ends);
    return offer(std::move(changed));
  }

  bool dropBoundaries(std::size_t kind) {
    bool better = false;
    for (std::size_t i = 0; i + 1 < ends(kind).size();) {
      std::vector<int> fewer = ends(kind);
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      const bool dropped = offer(kind, std::move(fewer));
      better |= dropped;
      i += dropped ? 0 : 1;
    }
    return better;
  }

  // By half of the two buckets at first, then by less, down to one gradient.
  bool shiftBoundaries(std::size_t kind) {
    bool better = false;
    for (std::size_t i = 0; i + 1 < ends(kind).size(); ++i) {
      for (int distance = (ends(kind)[i + 1] - begin(kind, i)) / 2; distance > 0; distance /= 2) {
        better |= shift(kind, i, -distance) || shift(kind, i, distance);
      }
    }
    return better;
  }

  // At a quarter, at half and at three quarters of a bucket.
  bool addBoundaries(std::size_t kind) {
    bool better = false;
    for (std::size_t i = 0; i < ends(kind).size(); ++i) {
      for (int quarter = 1; quarter <= 3; ++quarter) {
        const int first = begin(kind, i);
        const int boundary = first + (ends(kind)[i] - first) * quarter / 4;
        if (boundary > first) {
          std::vector<int> more = ends(kind);
          more.insert(more.begin() + static_cast<std::ptrdiff_t>(i), boundary);
          better |= offer(kind, std::move(more));
        }
      }
    }
    return better;
  }

  bool spent() const { return left_ <= 0; }
  PartitionSearch found() const { return found_; }

 private:
  const std::vector<int>& ends(std::size_t kind) const { return found_.ends[kind]; }
  int begin(std::size_t kind, std::size_t bucket) const { return bucket == 0 ? 0 : ends(kind)[bucket - 1]; }
  bool shift(std::size_t kind, std::size_t bucket, int distance) {
    std::vector<int> shifted = ends(kind);
    shifted[bucket] += distance;
    const bool allowed = shifted[bucket] > begin(kind, bucket) && shifted[bucket] < shifted[bucket + 1];
    return allowed && offer(kind, std::move(shifted));
  }

  const std::function<double(const EndsByKind&)>& step_;
  int left_;
  PartitionSearch found_;
};

}  // namespace

PartitionSearch searchPartition(const std::vector<Gradient>& gradients, const PositionsByKind& by_kind,
                                const BucketCost& reduce, const std::function<double(const EndsByKind&)>& step,
                                int most_simulations) {
  Search search(step, most_simulations);
  std::size_t all_bytes = 1;
  for (const auto& positions : by_kind) {
    all_bytes += bucketBytes(gradients, positions);
  }
  search.offer(uniformEnds(gradients, by_kind, all_bytes));
  search.offer(optimalEnds(gradients, by_kind, reduce));
  for (int limit = 1; limit <= kUniformLimits; ++limit) {
    const double bytes = static_cast<double>(all_bytes) / std::exp2(limit / 2.0);
    search.offer(uniformEnds(gradients, by_kind, static_cast<std::size_t>(std::max(1.0, bytes))));
  }
  for (bool better = true; better && !search.spent();) {
    better = false;
    for (std::size_t kind = 0; kind < by_kind.size(); ++kind) {
      better |= search.dropBoundaries(kind);
      better |= search.shiftBoundaries(kind);
      better |= search.addBoundaries(kind);
    }
  }
  return search.found();
}

}  // namespace torchext::core
