// What averaging over the generated groups does to the replicas: variance ratios and the mean iterate.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>

#include "core/base/check.h"
#include "core/base/random.h"
#include "core/prague/group_generator.h"
#include "core/prague/static_schedule.h"

namespace torchext::core {
namespace {

using Vector = std::vector<double>;

constexpr std::size_t kDims = 32;

// The replicas of a model, and P-Reduce.
class Replicas {
 public:
  Replicas(int workers, std::uint64_t seed) : values_(index(workers), Vector(kDims)) {
    Random random(seed);
    for (auto& vector : values_) {
      for (auto& value : vector) {
        value = 2 * random.uniform() - 1;
      }
    }
  }

  void average(const std::vector<int>& members) {
    for (std::size_t dim = 0; dim < kDims; ++dim) {
      double sum = 0;
      for (const int member : members) {
        sum += values_[index(member)][dim];
      }
      for (const int member : members) {
        values_[index(member)][dim] = sum / static_cast<double>(members.size());
      }
    }
  }

  Vector mean() const {
    Vector result(kDims, 0.0);
    for (std::size_t dim = 0; dim < kDims; ++dim) {
      for (const auto& vector : values_) {
        result[dim] += vector[dim];
      }
      result[dim] /= static_cast<double>(values_.size());
    }
    return result;
  }

  double variance() const {
    const Vector center = mean();
    double sum = 0;
    for (const auto& vector : values_) {
      for (std::size_t dim = 0; dim < kDims; ++dim) {
        sum += (vector[dim] - center[dim]) * (vector[dim] - center[dim]);
      }
    }
    return sum;
  }

  std::vector<Vector>& values() { return values_; }

 private:
  std::vector<Vector> values_;
};

// Synchronous rounds: everybody that waits for nothing asks; groups whose members all arrived are averaged.
class Rounds {
 public:
  explicit Rounds(const GeneratorOptions& options)
      : generator_(makeGroupGenerator(options)),
        waiting_(index(options.world_size), false),
        random_(options.seed + 1) {}

  // The groups that were completed in this round.
  std::vector<Group> next() {
    std::vector<int> order(waiting_.size());
    std::iota(order.begin(), order.end(), 0);
    random_.shuffle(order);
    done_.clear();
    now_ += 1;
    for (const int worker : order) {
      if (!waiting_[index(worker)]) {
        waiting_[index(worker)] = true;
        take(generator_->request(worker, now_));
      }
    }
    if (const auto deadline = generator_->nextDeadline()) {
      now_ = std::max(now_, *deadline);
      take(generator_->tick(now_));
    }
    return done_;
  }

 private:
  void take(const std::vector<Delivery>& deliveries) {
    for (const auto& delivery : deliveries) {
      auto& arrived = arrived_[delivery.group.id];
      if (++arrived == delivery.group.members.size()) {
        arrived_.erase(delivery.group.id);
        done_.push_back(delivery.group);
        for (const int member : delivery.group.members) {
          waiting_[index(member)] = false;
        }
        for (const int member : delivery.group.members) {
          take(generator_->complete(member, delivery.group.id, now_));
        }
      }
    }
  }

  std::unique_ptr<GroupGenerator> generator_;
  std::vector<bool> waiting_;
  Random random_;
  std::map<std::uint64_t, std::size_t> arrived_;
  std::vector<Group> done_;
  double now_ = 0;
};

GeneratorOptions world(int world_size, int group_size, GeneratorKind kind, std::uint64_t seed) {
  GeneratorOptions options;
  options.world_size = world_size;
  options.group_size = group_size;
  options.kind = kind;
  options.seed = seed;
  return options;
}

constexpr int kTrials = 400;

TEST(Mixing, ExpectedVarianceRatioOfADivision) {
  for (const int size : {2, 4, 8, 16}) {
    double ratio = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      const auto seed = static_cast<std::uint64_t>(trial);
      Replicas replicas(16, seed);
      const double before = replicas.variance();
      Rounds rounds(world(16, size, GeneratorKind::kDivision, seed));
      const auto groups = rounds.next();
      ASSERT_EQ(groups.size(), index(16 / size));
      for (const auto& group : groups) {
        replicas.average(group.members);
      }
      ratio += replicas.variance() / before / kTrials;
    }
    const double expected = (16.0 / size - 1.0) / 15.0;  // 0.467 for pairs, 0.200 for fours
    EXPECT_NEAR(ratio, expected, 0.02 * expected + 1e-12) << "groups of " << size;
  }
}

TEST(Mixing, ExpectedVarianceRatioOfOneRandomGroup) {
  for (const int size : {2, 4, 8}) {
    double ratio = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      const auto seed = static_cast<std::uint64_t>(trial);
      Replicas replicas(16, seed);
      const double before = replicas.variance();
      const auto generator = makeGroupGenerator(world(16, size, GeneratorKind::kRandom, seed));
      replicas.average(generator->request(trial % 16, 0).at(0).group.members);
      ratio += replicas.variance() / before / kTrials;
    }
    const double expected = 1.0 - (size - 1) / 15.0;
    EXPECT_NEAR(ratio, expected, 0.02 * expected) << "groups of " << size;
  }
}

// f_i(x) = |x - b_i|^2 / 2: gradients are linear in x, averaging keeps the mean, so the mean iterate is that of plain
// gradient descent on the mean of the f_i, whatever the groups. "atc": step, then average. "cta": average, then apply
// the gradient taken before.
void expectMeanFollowsGradientDescent(int workers, bool adapt_then_combine,
                                      const std::function<std::vector<std::vector<int>>(int)>& groups_of_round) {
  constexpr double kRate = 0.5;
  Replicas replicas(workers, 5);
  Replicas targets(workers, 6);
  const Vector target = targets.mean();
  Vector expected = replicas.mean();
  for (int round = 0; round < 60; ++round) {
    std::vector<Vector> steps = replicas.values();
    for (std::size_t worker = 0; worker < steps.size(); ++worker) {
      for (std::size_t dim = 0; dim < kDims; ++dim) {
        steps[worker][dim] = kRate * (steps[worker][dim] - targets.values()[worker][dim]);
      }
    }
    const auto descend = [&] {
      for (std::size_t worker = 0; worker < steps.size(); ++worker) {
        for (std::size_t dim = 0; dim < kDims; ++dim) {
          replicas.values()[worker][dim] -= steps[worker][dim];
        }
      }
    };
    if (adapt_then_combine) {
      descend();
    }
    for (const auto& members : groups_of_round(round)) {
      replicas.average(members);
    }
    if (!adapt_then_combine) {
      descend();
    }
    const Vector mean = replicas.mean();
    for (std::size_t dim = 0; dim < kDims; ++dim) {
      expected[dim] -= kRate * (expected[dim] - target[dim]);
      ASSERT_NEAR(mean[dim], expected[dim], 1e-15) << "round " << round;
    }
  }
}

TEST(Mixing, TheMeanIterateFollowsGradientDescentForEveryKindAndOrder) {
  for (const auto kind : {GeneratorKind::kRandom, GeneratorKind::kDivision, GeneratorKind::kInterIntra,
                          GeneratorKind::kSmart, GeneratorKind::kReadySet}) {
    for (const bool adapt_then_combine : {true, false}) {
      SCOPED_TRACE(toString(kind));
      auto options = world(8, 3, kind, 1);
      options.host_of = {0, 0, 0, 0, 1, 1, 1, 1};
      options.sync_every = 5;
      Rounds rounds(options);
      expectMeanFollowsGradientDescent(8, adapt_then_combine, [&](int /*round*/) {
        std::vector<std::vector<int>> groups;
        for (const auto& group : rounds.next()) {
          groups.push_back(group.members);
        }
        return groups;
      });
    }
  }
}

TEST(Mixing, TheMeanIterateFollowsGradientDescentOnTheStaticSchedule) {
  const std::vector<int> host_of{0, 0, 0, 0, 1, 1, 1, 1};
  for (const bool adapt_then_combine : {true, false}) {
    expectMeanFollowsGradientDescent(8, adapt_then_combine, [&](int round) {
      std::vector<std::vector<int>> groups;
      for (int rank = 0; rank < 8; ++rank) {
        auto members = staticGroup(rank, round, 8, host_of);
        if (members.front() == rank) {
          groups.push_back(std::move(members));
        }
      }
      return groups;
    });
  }
}

// Every kind brings 1,024 replicas together: no part of the world is cut off.
TEST(Mixing, ThousandRanksReachConsensus) {
  for (const auto kind : {GeneratorKind::kRandom, GeneratorKind::kDivision, GeneratorKind::kInterIntra,
                          GeneratorKind::kSmart, GeneratorKind::kReadySet}) {
    SCOPED_TRACE(toString(kind));
    constexpr int kRanks = 1024;
    auto options = world(kRanks, 8, kind, 3);
    options.slowdown_threshold = 8;
    for (int rank = 0; rank < kRanks; ++rank) {
      options.host_of.push_back(rank / 8);
    }
    Rounds rounds(options);
    Replicas replicas(kRanks, 4);
    const double before = replicas.variance();
    for (int round = 0; round < 8; ++round) {
      for (const auto& group : rounds.next()) {
        replicas.average(group.members);
      }
    }
    EXPECT_LT(replicas.variance() / before, 0.1);
  }
}

}  // namespace
}  // namespace torchext::core
