#include "core/auto/bucket_program.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kTie = 1e-9;  // of the finish

class Program {
 public:
  Program(const std::vector<double>& ready, const std::vector<std::size_t>& bytes, const BucketCost& cost)
      : count_(bytes.size()), ready_(bytes.size() + 1, 0.0), bytes_before_(bytes.size() + 1, 0), cost_(cost) {
    if (bytes.empty() || ready.size() != bytes.size()) {
      throwInvalid("number of ready times", ready.size(), concat("1 or more, as many as sizes: ", bytes.size()));
    }
    for (std::size_t i = 0; i < count_; ++i) {
      ready_[i + 1] = std::max(ready_[i], ready[i]);
    }
    std::partial_sum(bytes.begin(), bytes.end(), bytes_before_.begin() + 1);
  }

  double earliestFinish() const {
    std::vector<double> finish(count_ + 1, 0.0);
    for (std::size_t end = 1; end <= count_; ++end) {
      finish[end] = kNever;
      for (std::size_t first = 0; first < end; ++first) {
        finish[end] = std::min(finish[end], finishAfter(finish[first], first, end));
      }
    }
    return finish.back();
  }

  // [k][end] the earliest finish of a prefix in k buckets or less, up to the least k that meets the deadline. Extended
  // are only prefixes that one more bucket made faster, and that are early enough for what follows them.
  std::vector<std::vector<double>> finishByCount(double deadline) const {
    const std::vector<double> latest = latestFinish(deadline);
    std::vector<std::vector<double>> finish{std::vector<double>(count_ + 1, kNever)};
    finish[0][0] = 0;
    std::vector<std::size_t> faster{0};
    while (finish.back().back() > deadline) {
      const std::vector<double> before = finish.back();
      std::vector<double> now = before;
      for (const std::size_t first : faster) {
        for (std::size_t end = first + 1; end <= count_; ++end) {
          const double extended = finishAfter(before[first], first, end);
          now[end] = extended <= latest[end] ? std::min(now[end], extended) : now[end];
        }
      }
      faster.clear();
      for (std::size_t end = 1; end <= count_; ++end) {
        if (now[end] < before[end]) {
          faster.push_back(end);
        }
      }
      finish.push_back(std::move(now));
    }
    return finish;
  }

  // From the last to the first, each bucket as large as the deadline of its prefix allows.
  std::vector<int> largestLast(const std::vector<std::vector<double>>& finish, double deadline) const {
    std::vector<int> ends;
    std::size_t end = count_;
    for (std::size_t buckets = finish.size() - 1; buckets > 0 && end > 0; --buckets) {
      ends.push_back(static_cast<int>(end));
      const double limit = std::max(deadline, finish[buckets][end]);  // the same, but for rounding
      std::size_t first = 0;
      while (finishAfter(finish[buckets - 1][first], first, end) > limit) {
        ++first;
      }
      deadline = limit - costOf(first, end);
      end = first;
    }
    std::reverse(ends.begin(), ends.end());
    return ends;
  }

  double finishOf(const std::vector<int>& ends) const {
    double finish = 0;
    std::size_t first = 0;
    for (const int end : ends) {
      finish = finishAfter(finish, first, index(end));
      first = index(end);
    }
    return finish;
  }

 private:
  // [first] the latest finish of a prefix from which the others can meet the deadline.
  std::vector<double> latestFinish(double deadline) const {
    std::vector<double> latest(count_ + 1, -kNever);
    latest.back() = deadline;
    for (std::size_t first = count_; first-- > 0;) {
      for (std::size_t end = first + 1; end <= count_; ++end) {
        const double seconds = costOf(first, end);
        if (ready_[end] + seconds <= latest[end]) {
          latest[first] = std::max(latest[first], latest[end] - seconds);
        }
      }
    }
    return latest;
  }

  // Of the bucket first + 1 .. end.
  double costOf(std::size_t first, std::size_t end) const { return cost_(bytes_before_[end] - bytes_before_[first]); }
  // The same, where the link is free from `before`.
  double finishAfter(double before, std::size_t first, std::size_t end) const {
    return std::max(ready_[end], before) + costOf(first, end);
  }

  std::size_t count_;
  std::vector<double> ready_;              // [end] of the last gradient of a prefix
  std::vector<std::size_t> bytes_before_;  // [end] of a prefix
  const BucketCost& cost_;
};

}  // namespace

BucketProgram optimalBuckets(const std::vector<double>& ready, const std::vector<std::size_t>& bytes,
                             const BucketCost& cost) {
  const Program program(ready, bytes, cost);
  const double deadline = program.earliestFinish() * (1 + kTie);
  const std::vector<int> ends = program.largestLast(program.finishByCount(deadline), deadline);
  return {ends, program.finishOf(ends)};
}

EndsByKind optimalEnds(const std::vector<Gradient>& gradients, const PositionsByKind& by_kind, const BucketCost& cost) {
  EndsByKind ends;
  for (const auto& positions : by_kind) {
    std::vector<double> ready;
    std::vector<std::size_t> bytes;
    for (const int position : positions) {
      ready.push_back(gradients[index(position)].ready_seconds);
      bytes.push_back(gradients[index(position)].bytes);
    }
    ends.push_back(optimalBuckets(ready, bytes, cost).ends);
  }
  return ends;
}

}  // namespace torchext::core
