#include "core/auto/strategy_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <string>

#include "core/auto/factor_choice.h"
#include "core/auto/partition_search.h"
#include "tests/cpp/core/auto/layered_model.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core::testing {
namespace {

// 54 layers whose sizes grow, as a residual network's do.
StepProfile growingLayers(std::size_t total_bytes) {
  std::vector<std::size_t> bytes;
  for (int layer = 0; layer < 54; ++layer) {
    bytes.push_back(static_cast<std::size_t>(std::exp(layer / 12.0) * 1000));
  }
  const std::size_t sum = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
  for (auto& size : bytes) {
    size = size * total_bytes / sum;
  }
  return layeredModel(bytes, 0.1 / 54, 0.2 / 54);
}

// One gigabit a second, by formula.
LinkModel gigabit(int ranks) {
  const Network network{ranks, {3e-4, 119e6}};
  LinkModel link{network, CostTable::line(0, 0), {}, std::nullopt};
  const auto table = [&](auto seconds) {
    std::vector<CostPoint> points;
    for (std::size_t bytes = 4096; bytes <= std::size_t{1} << 24U; bytes *= 4) {
      points.push_back({bytes, seconds(static_cast<double>(bytes))});
    }
    return CostTable(points);
  };
  const auto half = table([&](double bytes) { return halfSeconds(Algorithm::kRing, network, bytes); });
  link.all_reduce = table([&](double bytes) { return allReduceSeconds(Algorithm::kRing, network, bytes); });
  link.transports = {{Algorithm::kRing, half, half}};
  link.rows = table([&](double bytes) { return rowsSeconds(network, bytes); });
  return link;
}

const Candidate& find(const std::vector<Candidate>& candidates, const std::string& way, const std::string& form,
                      bool factors = false) {
  const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
    return candidate.way == way && candidate.form == form && candidate.factor_layers.empty() != factors;
  });
  EXPECT_NE(found, candidates.end()) << way << " " << form;
  return *found;
}

const Candidate& chosenOf(const std::vector<Candidate>& candidates) {
  EXPECT_EQ(std::count_if(candidates.begin(), candidates.end(), [](const Candidate& c) { return c.chosen; }), 1);
  return *std::find_if(candidates.begin(), candidates.end(), [](const Candidate& c) { return c.chosen; });
}

TEST(PartitionSearch, IsNeverWorseThanItsSeeds) {
  Random random(23);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::size_t> bytes;
    for (std::size_t layers = 1 + random.below(40); bytes.size() < layers;) {
      bytes.push_back(1 + random.below(1000));
    }
    StepProfile profile = layeredModel(bytes, 0.4, 0.8);
    for (Gradient& gradient : profile.gradients) {
      gradient.kind = static_cast<int>(random.below(1 + round % 2));
    }
    const LinkModel link = straightLink(random.uniform(), random.uniform() / 500);
    const CandidateSimulator simulator(profile, link);
    const PositionsByKind by_kind = gradientsByKind(profile.gradients);
    Candidate candidate;
    candidate.way = "dear";
    candidate.algorithm = "ring";
    candidate.form = "sharded";
    std::set<EndsByKind> asked;
    const auto step = [&](const EndsByKind& ends) {
      candidate.buckets = bucketsOfEnds(by_kind, ends);
      asked.insert(ends);
      return simulator.run(candidate).step_seconds;
    };
    const BucketCost reduce = [&](std::size_t size) { return simulator.reduceSeconds(candidate, size); };
    const PartitionSearch found = searchPartition(profile.gradients, by_kind, reduce, step);
    ASSERT_LE(found.simulations, kMostSimulations);
    ASSERT_TRUE(asked.contains(optimalEnds(profile.gradients, by_kind, reduce)));
    ASSERT_TRUE(asked.contains(uniformEnds(profile.gradients, by_kind, profile.gradientBytes())));
    ASSERT_EQ(step(found.ends), found.step_seconds);
    for (const EndsByKind& ends : std::set<EndsByKind>(asked)) {
      ASSERT_LE(found.step_seconds, step(ends) * (1 + 1e-9));
    }
    ASSERT_EQ(searchPartition(profile.gradients, by_kind, reduce, step).ends, found.ends);  // repeats
    ASSERT_LE(searchPartition(profile.gradients, by_kind, reduce, step, 20).simulations, 20);
  }
}

TEST(PartitionSearch, BeatsTheBestUniformLimitOfGrowingLayers) {
  const StepProfile profile = growingLayers(40'000'000);
  const LinkModel link = gigabit(4);
  const CandidateSimulator simulator(profile, link);
  const PositionsByKind by_kind = gradientsByKind(profile.gradients);
  Candidate candidate = withEnds(profile, "dear", "sharded", {});
  const auto step = [&](const EndsByKind& ends) {
    candidate.buckets = bucketsOfEnds(by_kind, ends);
    return simulator.run(candidate).step_seconds;
  };
  double uniform = 1e9;
  for (std::size_t limit = 500'000; limit < 80'000'000; limit = limit * 5 / 4) {
    uniform = std::min(uniform, step(uniformEnds(profile.gradients, by_kind, limit)));
  }
  const PartitionSearch found = searchPartition(
      profile.gradients, by_kind, [&](std::size_t size) { return simulator.reduceSeconds(candidate, size); }, step);
  EXPECT_LT(found.step_seconds, uniform);
}

TEST(FactorChoice, EligibleLayersByWhatTheySave) {
  StepProfile profile = layeredModel({4 * 1024 * 1024, 64 * 1024, 16 * 1024 * 1024}, 0.01, 0.02);
  profile.layers = {{LayerRows::Kind::kLinear, 16, 1024, 1024, 4},
                    {LayerRows::Kind::kLinear, 512, 128, 128, 4},  // more rows than it has outputs
                    {LayerRows::Kind::kLinear, 16, 2048, 2048, 4}};
  for (Gradient& gradient : profile.gradients) {
    gradient.layer = gradient.first_use;
  }
  LinkModel link = gigabit(4);
  const BucketCost saved = [&](std::size_t bytes) { return link.all_reduce.seconds(bytes); };
  const auto eligible = eligibleFactors(profile, link, saved);
  ASSERT_EQ(eligible.size(), 2U);
  EXPECT_EQ(eligible[0].layer, 2);
  EXPECT_EQ(eligible[1].layer, 0);
  link.operations_per_second = 1e6;  // so slow that arithmetic costs more than the link
  EXPECT_TRUE(eligibleFactors(profile, link, saved).empty());
  link.operations_per_second = 0;  // unknown
  profile.layers[0].rows = 0;      // unknown
  EXPECT_EQ(eligibleFactors(profile, link, saved).size(), 1U);
  link.rows.reset();
  EXPECT_TRUE(eligibleFactors(profile, link, saved).empty());
}

TEST(FactorChoice, KeepsALayerOnlyWhereTheStepFalls) {
  const std::vector<FactorGain> eligible{{2, 3.0}, {0, 2.0}, {1, 1.0}};
  const auto step = [](const std::vector<int>& layers) {
    double seconds = 10;
    for (const int layer : layers) {
      seconds += layer == 0 ? 1 : -1;
    }
    return seconds;
  };
  EXPECT_EQ(chooseFactors(eligible, step), (std::vector<int>{1, 2}));
  EXPECT_TRUE(chooseFactors({}, step).empty());
}

TEST(StrategySearch, GrowingLayersAtAGigabit) {
  const auto candidates = searchStrategies(growingLayers(40'000'000), gigabit(4));
  const Candidate& reference = find(candidates, "ddp", "default");
  const Candidate& program = find(candidates, "ddp", "program");
  const Candidate& sharded = find(candidates, "dear", "sharded");
  EXPECT_LE(program.step_seconds, reference.step_seconds);
  EXPECT_LT(sharded.step_seconds * 1.15, program.step_seconds);
  EXPECT_LT(sharded.step_seconds * 1.2, reference.step_seconds);
  EXPECT_EQ(chosenOf(candidates).way, "dear");
  EXPECT_EQ(chosenOf(candidates).reason, "chosen");
  EXPECT_EQ(reference.reason, "slower; the reference");
  EXPECT_EQ(sharded.algorithm, "ring");
  EXPECT_EQ(find(candidates, "factors", "").reason, "no layer whose rows could be sent");
  EXPECT_NEAR(reference.compute_seconds, 0.3, 1e-12);
  EXPECT_NEAR(reference.step_seconds,
              reference.compute_seconds + reference.exposed_reduce_seconds + reference.exposed_gather_seconds, 1e-9);
}

TEST(StrategySearch, DearByTheTransportThatIsFaster) {
  LinkModel link = gigabit(4);
  const Transport& ring = link.transports.front();
  const auto times = [](const CostTable& table, double factor) {
    std::vector<CostPoint> points = table.points();
    for (CostPoint& point : points) {
      point.seconds *= factor;
    }
    return CostTable(points);
  };
  for (const double factor : {0.5, 2.0}) {
    LinkModel both = link;
    both.transports.push_back(
        {Algorithm::kHierarchical, times(ring.reduce_scatter, factor), times(ring.all_gather, factor)});
    const auto candidates = searchStrategies(growingLayers(40'000'000), both);
    EXPECT_EQ(chosenOf(candidates).algorithm, factor < 1 ? "hierarchical" : "ring");
    const auto dear = std::ranges::count_if(candidates, [](const Candidate& each) { return each.way == "dear"; });
    EXPECT_EQ(dear, 4);
  }
}

TEST(StrategySearch, CandidatesAreInOrderAndRepeat) {
  SearchOptions options;
  options.inexact = {{"dssync", "atc", 4, 0}, {"hop", "parallel", 2, 0.25}, {"prague", "cta", 2, 0}};
  const auto candidates = searchStrategies(growingLayers(40'000'000), gigabit(4), options);
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    const Candidate& before = candidates[i - 1];
    const Candidate& after = candidates[i];
    EXPECT_TRUE(before.exact || !after.exact);
    if (before.exact == after.exact) {
      EXPECT_TRUE(before.possible || !after.possible);
      EXPECT_TRUE(before.possible != after.possible || before.step_seconds <= after.step_seconds);
    }
  }
  const auto again = searchStrategies(growingLayers(40'000'000), gigabit(4), options);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    EXPECT_EQ(again[i].step_seconds, candidates[i].step_seconds);
    EXPECT_EQ(again[i].buckets, candidates[i].buckets);
  }
}

TEST(StrategySearch, EveryCandidateSendsEachGradientOnce) {
  StepProfile profile = growingLayers(10'000'000);
  profile.gradients[3].kind = 1;
  profile.gradients[9].kind = 1;
  for (const Candidate& candidate : searchStrategies(profile, gigabit(4))) {
    std::set<int> seen;
    for (const auto& bucket : candidate.buckets) {
      for (const int position : bucket) {
        EXPECT_TRUE(seen.insert(position).second);
        EXPECT_EQ(profile.gradients[index(position)].kind, profile.gradients[index(bucket.front())].kind);
      }
    }
    if (candidate.possible) {
      EXPECT_EQ(seen.size(), profile.gradients.size()) << candidate.way;
      EXPECT_EQ(simulateCandidate(profile, gigabit(4), candidate).step_seconds, candidate.step_seconds);
    }
  }
}

TEST(StrategySearch, DdpStaysUnlessTheGainIsLarge) {
  const StepProfile profile = growingLayers(40'000'000);
  SearchOptions options;
  options.spread = 5;
  EXPECT_EQ(chosenOf(searchStrategies(profile, gigabit(4), options)).form, "default");
  EXPECT_NE(find(searchStrategies(profile, gigabit(4), options), "dear", "sharded").reason.find("500 %"),
            std::string::npos);
  // Noise of the links is no noise of compute, which is most of this step.
  options.spread = 0.3;
  const auto candidates = searchStrategies(profile, straightLink(1e-3, 3e-9), options);
  const double step = chosenOf(candidates).step_seconds;
  const double reference = find(candidates, "ddp", "default").step_seconds;
  EXPECT_EQ(chosenOf(candidates).way, "dear") << reference << " s of the reference";
  EXPECT_LT(reference, step * (1 + options.spread)) << step << " s of the chosen";
  // A network that is no bottleneck.
  const LinkModel fast = straightLink(1e-7, 1e-13);
  EXPECT_EQ(chosenOf(searchStrategies(profile, fast)).form, "default");
}

TEST(StrategySearch, WideLayersWithFewRowsGoAsRows) {
  StepProfile profile = layeredModel({2048 * 2048 * 4, 1024}, 0.01, 0.02);
  profile.layers = {{LayerRows::Kind::kLinear, 16, 2048, 2048, 4}};
  profile.gradients[1].layer = 0;
  const auto candidates = searchStrategies(profile, gigabit(4));
  const Candidate& chosen = chosenOf(candidates);
  EXPECT_EQ(chosen.factor_layers, std::vector<int>{0});
  EXPECT_EQ(chosen.buckets, (Buckets{{0}}));
  EXPECT_LT(chosen.step_seconds * 3, find(candidates, "ddp", "default").step_seconds);
  EXPECT_TRUE(std::none_of(candidates.begin(), candidates.end(), [](const auto& c) { return c.way == "factors"; }));
  // DDP wraps no model of which it averages nothing.
  StepProfile whole = profile;
  whole.gradients[0].layer = 0;
  const auto all = searchStrategies(whole, gigabit(4));
  EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](const auto& c) { return c.factor_layers.empty(); }));
  profile.layers[0].rows = 4096;
  EXPECT_EQ(find(searchStrategies(profile, gigabit(4)), "factors", "").reason, "no layer has few enough rows");
}

// With its rows every rank steps a layer whole, so that neither form of dear gathers any of it.
TEST(StrategySearch, RowsBesideDearAreGatheredInNeitherForm) {
  StepProfile profile = growingLayers(40'000'000);
  profile.layers = {{LayerRows::Kind::kLinear, 16, 2048, 2048, 4}};
  profile.gradients.front() = {2048 * 2048 * 4, profile.gradients.front().ready_seconds, 53, 0, 0};
  profile.optimizer_seconds = 0.1;
  const LinkModel link = gigabit(4);
  const auto candidates = searchStrategies(profile, link);
  const Candidate& chosen = chosenOf(candidates);
  EXPECT_EQ(chosen.way, "dear");
  EXPECT_EQ(chosen.factor_layers, std::vector<int>{0});
  const double others = std::min(find(candidates, "ddp", "program", /*factors=*/true).step_seconds,
                                 find(candidates, "dear", "replicated").step_seconds);
  EXPECT_LT(chosen.step_seconds * 1.05, others);
  const CandidateSimulator simulator(profile, link);
  Candidate sharded = find(candidates, "dear", "sharded", /*factors=*/true);
  const double share = 2048 * 2048 * 4.0 / static_cast<double>(profile.gradientBytes());
  EXPECT_NEAR(simulator.computeOf(sharded).optimizer_seconds, 0.1 * (share + (1 - share) / 4), 1e-9);
  Candidate replicated = sharded;
  replicated.form = "replicated";
  EXPECT_NEAR(simulator.run(sharded).exposed_gather_seconds, simulator.run(replicated).exposed_gather_seconds, 0.1);
}

// The bucket behind the layer's own would stay the last to leave, with all of its gradients.
TEST(StrategySearch, RowsPayOnceOtherGradientsAreInNewBuckets) {
  StepProfile profile = layeredModel({8'000'000, 8'000'000, 8'000'000, 16'777'216}, 0.025, 0.05);
  profile.layers = {{LayerRows::Kind::kLinear, 16, 2048, 2048, 4}};
  profile.gradients.front().layer = 0;
  LinkModel link = gigabit(4);
  link.all_reduce = CostTable::line(0.03, 1 / 80e6);  // so slow to begin that gradients behind a long message wait
  Candidate before = withEnds(profile, "ddp", "program", {1, 4});
  Candidate after = before;
  after.factor_layers = {0};
  after.buckets = {{1, 2, 3}};
  const CandidateSimulator simulator(profile, link);
  const auto found = searchStrategies(profile, link);
  const Candidate& rows = find(found, "ddp", "program", /*factors=*/true);
  EXPECT_GT(rows.buckets.size(), 1U);
  EXPECT_LT(rows.step_seconds, simulator.run(after).step_seconds);
}

TEST(StrategySearch, ATableGoesAsRowsWhereTheseAreFewerBytes) {
  StepProfile profile = layeredModel({std::size_t{50257} * 256 * 4, 1024}, 0.01, 0.02);
  profile.layers = {{LayerRows::Kind::kEmbedding, 64, 50257, 256, 4}};
  profile.gradients[1].layer = 0;
  EXPECT_EQ(chosenOf(searchStrategies(profile, gigabit(4))).factor_layers, std::vector<int>{0});
  const double fewest = fewestRowsToReduce(profile.layers[0], 4);
  EXPECT_NEAR(fewest, 2.0 * 50257 * 256 * 4 / (4 * (256 * 4 + 8)), 1e-6);
  profile.layers[0].rows = static_cast<std::size_t>(0.9 * fewest);
  const auto few = searchStrategies(profile, gigabit(4));
  EXPECT_FALSE(find(few, "ddp", "program", /*factors=*/true).factor_layers.empty());
  profile.layers[0].rows = static_cast<std::size_t>(1.1 * fewest);
  EXPECT_EQ(find(searchStrategies(profile, gigabit(4)), "factors", "").reason, "no layer has few enough rows");
}

TEST(StrategySearch, InexactWaysAreChosenByNameOnly) {
  const StepProfile profile = growingLayers(40'000'000);
  SearchOptions options;
  options.inexact = {{"prague", "cta", 2, 0}, {"prague", "atc", 2, 0}, {"hop", "parallel", 2, 0.2}};
  const auto exact = searchStrategies(profile, gigabit(4), options);
  EXPECT_TRUE(chosenOf(exact).exact);
  const Candidate& beside = find(exact, "prague", "cta");
  const double average = gigabit(4).on({2, {3e-4, 119e6}}).all_reduce.seconds(profile.gradientBytes());
  EXPECT_DOUBLE_EQ(beside.rho, 1.0 / 3);
  EXPECT_NEAR(beside.step_seconds, std::max(0.3, average), 1e-12);
  EXPECT_NEAR(find(exact, "prague", "atc").step_seconds, 0.3 + average, 1e-12);
  EXPECT_NEAR(find(exact, "hop", "parallel").step_seconds,
              3e-4 + 2 * static_cast<double>(profile.gradientBytes()) / 119e6, 1e-12);
  options.choose = "prague";
  const auto named = searchStrategies(profile, gigabit(4), options);
  EXPECT_EQ(chosenOf(named).form, "cta");
  EXPECT_EQ(find(named, "dear", "sharded").reason, "choose is \"prague\"");
  options.choose = "dssync";
  EXPECT_THROW_MESSAGE(searchStrategies(profile, gigabit(4), options), std::invalid_argument, "choose = dssync");
}

TEST(StrategySearch, GroupsWaitForTheSlowestOfTheirOwn) {
  StepProfile profile = growingLayers(1000);
  profile.step_samples = {{0.3}, {0.3}, {0.9}, {0.3}};
  SearchOptions options;
  options.inexact = {{"prague", "cta", 2, 0}};
  const auto candidates = searchStrategies(profile, gigabit(4), options);
  EXPECT_NEAR(find(candidates, "prague", "cta").compute_seconds, 0.6, 1e-9);
  EXPECT_NEAR(find(candidates, "ddp", "default").compute_seconds, 0.9, 1e-9);
}

TEST(StrategySearch, WhatCannotBeSaysWhy) {
  const StepProfile profile = growingLayers(40'000'000);
  SearchOptions options;
  options.refused = {{"dear sharded", "LBFGS"}, {"factors", "torch.compile"}};
  options.inexact = {{"hop", "serial", 2, 0.2}};
  options.refused["hop"] = "one host";
  const auto candidates = searchStrategies(profile, gigabit(4), options);
  EXPECT_FALSE(find(candidates, "dear", "sharded").possible);
  EXPECT_EQ(find(candidates, "dear", "sharded").reason, "LBFGS");
  EXPECT_EQ(find(candidates, "factors", "").reason, "torch.compile");
  EXPECT_EQ(find(candidates, "hop", "serial").reason, "one host");
  EXPECT_EQ(chosenOf(candidates).form, "replicated");
  options.spare_bytes = 1e6;
  const auto small = searchStrategies(profile, gigabit(4), options);
  EXPECT_EQ(chosenOf(small).form, "default");
  EXPECT_NE(find(small, "dear", "replicated").reason.find("1 MB are spare"), std::string::npos);
  LinkModel plain = gigabit(4);
  plain.transports.clear();
  plain.rows.reset();
  const auto ddp = searchStrategies(profile, plain);
  EXPECT_EQ(find(ddp, "dear", "replicated").reason, "no reduce-scatter was measured");
  EXPECT_EQ(find(ddp, "factors", "").reason, "no exchange of rows was measured");
}

TEST(StrategySearch, A1024RankNetworkThatIsNotThere) {
  const LinkModel large = gigabit(4).on({1024, {3e-4, 119e6}});
  SearchOptions options;
  options.inexact = {{"prague", "cta", 32, 0}};
  const auto candidates = searchStrategies(growingLayers(40'000'000), large, options);
  // 1023 hops a half: one bucket.
  EXPECT_EQ(find(candidates, "ddp", "program").buckets.size(), 1U);
  EXPECT_GT(find(candidates, "ddp", "program").step_seconds, 2 * 1023 * 3e-4);
  EXPECT_LT(find(candidates, "prague", "cta").step_seconds, find(candidates, "ddp", "program").step_seconds);
}

TEST(StrategySearch, BadOptionsAreNamed) {
  const StepProfile profile = growingLayers(1000);
  const auto refuses = [&](auto change, const char* message) {
    SearchOptions options;
    change(options);
    EXPECT_THROW_MESSAGE(searchStrategies(profile, gigabit(4), options), std::invalid_argument, message);
  };
  refuses([](SearchOptions& o) { o.spread = -1; }, "spread = -1");
  refuses([](SearchOptions& o) { o.spare_bytes = -1; }, "spare_bytes = -1");
  refuses([](SearchOptions& o) { o.inexact = {{"local", "cta", 2, 0}}; }, "inexact way = local");
  refuses([](SearchOptions& o) { o.inexact = {{"prague", "serial", 2, 0}}; }, "order = serial: allowed cta, atc");
  refuses([](SearchOptions& o) { o.inexact = {{"prague", "cta", 5, 0}}; }, "partners = 5: allowed 2..4");
  refuses([](SearchOptions& o) { o.inexact = {{"hop", "serial", 4, 0}}; }, "partners = 4: allowed 1..3");
  EXPECT_THROW_MESSAGE(searchStrategies(profile, straightLink(1, 1, 1)), std::invalid_argument, "ranks = 1");
}

}  // namespace
}  // namespace torchext::core::testing
