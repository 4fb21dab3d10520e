#include "core/auto/iteration_simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/auto/bucket_program.h"
#include "tests/cpp/core/auto/layered_model.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core::testing {
namespace {

using Ends = std::vector<int>;

double stepOf(const StepProfile& profile, const LinkModel& link, const char* way, const char* form, const Ends& ends) {
  return simulateCandidate(profile, link, withEnds(profile, way, form, ends)).step_seconds;
}

struct Row {
  double a;
  double b;
  Ends ends;
  double ddp;
  double dear;
};

TEST(IterationSimulator, TheThreeLayersOfTheDesign) {
  const std::vector<Row> rows{{1, 1, {3}, 23, 23},   {1, 1, {1, 3}, 21, 21},   {1, 1, {1, 2, 3}, 23, 21},
                              {2, 1, {3}, 25, 25},   {2, 1, {1, 3}, 25, 24},   {2, 1, {1, 2, 3}, 29, 27},
                              {.5, .5, {3}, 16, 16}, {.5, .5, {1, 3}, 15, 15}, {.5, .5, {1, 2, 3}, 14, 13.5}};
  const StepProfile profile = layeredModel({3, 2, 1}, 1, 2);
  for (const auto& [a, b, ends, ddp, dear] : rows) {
    const LinkModel link = straightLink(a, b);
    EXPECT_DOUBLE_EQ(stepOf(profile, link, "ddp", "program", ends), ddp) << a << " " << ends.size();
    EXPECT_DOUBLE_EQ(stepOf(profile, link, "dear", "sharded", ends), dear) << a << " " << ends.size();
    EXPECT_DOUBLE_EQ(stepOf(profile, link, "dear", "replicated", ends), dear) << a << " " << ends.size();
  }
}

TEST(IterationSimulator, ManyEqualLayers) {
  constexpr int kLayers = 300;
  const StepProfile profile = layeredModel(std::vector<std::size_t>(kLayers, 1000), 1.0 / kLayers, 2.0 / kLayers);
  const std::vector<std::pair<double, double>> gains{{1, 1}, {2, 1}, {3, 1.14}, {4, 1.25}, {6, 1.17}};
  for (const auto& [forwards, gain] : gains) {
    const LinkModel link = straightLink(0, forwards / 2 / (kLayers * 1000));
    const double ddp = stepOf(profile, link, "ddp", "program", singly(kLayers));
    const double dear = stepOf(profile, link, "dear", "sharded", singly(kLayers));
    EXPECT_NEAR(ddp / dear, gain, 0.01) << forwards;
  }
}

TEST(IterationSimulator, TheTimelineIsTheStep) {
  const StepProfile profile = layeredModel({3, 2, 1}, 1, 2);
  const Candidate candidate = withEnds(profile, "dear", "sharded", {1, 2, 3});
  const Iteration iteration = simulateCandidate(profile, straightLink(1, 1), candidate);
  // Gathers 4, 3 and 2; the first layer at 4, the others wait for nothing but the link.
  EXPECT_DOUBLE_EQ(iteration.step_seconds, 21);
  EXPECT_DOUBLE_EQ(iteration.exposed_gather_seconds, 4 + 2 + 1);
  EXPECT_DOUBLE_EQ(iteration.exposed_reduce_seconds, 21 - 16);
  double link = 0;
  double compute = 0;
  double last = 0;
  for (const auto& [activity, item, begin, end] : iteration.timeline) {
    const bool on_link = activity == Activity::kReduce || activity == Activity::kGather;
    double& free = on_link ? link : compute;
    EXPECT_GE(begin, free) << toString(activity) << item;  // nothing overlaps on a row
    free = end;
    last = std::max(last, end);
  }
  EXPECT_DOUBLE_EQ(last, iteration.step_seconds);
  EXPECT_EQ(iteration.timeline.size(), 3U + 3 + 1 + 3);
  EXPECT_EQ(iteration.timeline[0].item, 2);  // the last bucket is needed first
}

TEST(IterationSimulator, UnpackingAndOptimizerAreCompute) {
  const std::vector<BucketMessage> messages{{1, 2, 0.5, 0, -1, false, 0}, {2, 3, 0.5, 0, -1, false, 1}};
  const Iteration iteration = simulateIteration({{1}, 2, 0.25}, messages);
  // Reduces end at 4 and 7; the first bucket is unpacked meanwhile.
  EXPECT_DOUBLE_EQ(iteration.exposed_reduce_seconds, 7.5 - 3);
  EXPECT_DOUBLE_EQ(iteration.step_seconds, 7.75);
  EXPECT_TRUE(iteration.timeline.empty());
  EXPECT_DOUBLE_EQ(simulateIteration({{1}, 20, 0.25}, messages).step_seconds, 1 + 20 + 1 + 0.25);
}

TEST(IterationSimulator, ParametersThatNobodyReadsAreGatheredLast) {
  const std::vector<BucketMessage> messages{{1, 1, 0, 5, -1, true, 0}, {2, 1, 0, 2, 0, true, 1}};
  const Iteration iteration = simulateIteration({{1}, 2, 0}, messages);
  EXPECT_DOUBLE_EQ(iteration.exposed_gather_seconds, 2);
  // The link is busy with them until 7, which is after the backward pass.
  EXPECT_DOUBLE_EQ(iteration.step_seconds, 9);
}

struct Setting {
  std::vector<std::size_t> layer_bytes;
  double alpha;
  double beta;
  Ends ends;
};

Setting randomSetting(Random& random) {
  Setting setting{{}, random.uniform(), random.uniform() / 50, {}};
  const int layers = 1 + static_cast<int>(random.below(12));
  for (int layer = 1; layer <= layers; ++layer) {
    setting.layer_bytes.push_back(random.below(100));
    if (layer == layers || random.below(2) == 0) {
      setting.ends.push_back(layer);
    }
  }
  return setting;
}

TEST(IterationSimulator, AWorseNetworkOrMoreBytesAreNeverFaster) {
  Random random(17);
  for (int round = 0; round < 500; ++round) {
    const Setting setting = randomSetting(random);
    const StepProfile profile = layeredModel(setting.layer_bytes, 0.4, 0.8);
    std::vector<std::size_t> more_bytes = setting.layer_bytes;
    more_bytes[random.below(static_cast<std::uint32_t>(more_bytes.size()))] += 30;
    for (const char* way : {"ddp", "dear"}) {
      const double step = stepOf(profile, straightLink(setting.alpha, setting.beta), way, "sharded", setting.ends);
      const auto worse = [&](double alpha, double beta, const std::vector<std::size_t>& bytes) {
        return stepOf(layeredModel(bytes, 0.4, 0.8), straightLink(alpha, beta), way, "sharded", setting.ends);
      };
      ASSERT_GE(worse(setting.alpha * 1.5, setting.beta, setting.layer_bytes), step - 1e-9);
      ASSERT_GE(worse(setting.alpha, setting.beta * 1.5, setting.layer_bytes), step - 1e-9);
      ASSERT_GE(worse(setting.alpha, setting.beta, more_bytes), step - 1e-9);
      ASSERT_GE(step, profile.computeSeconds() - 1e-9);
    }
  }
}

TEST(IterationSimulator, DdpEndsWhenTheProgramSays) {
  Random random(19);
  for (int round = 0; round < 300; ++round) {
    const Setting setting = randomSetting(random);
    const StepProfile profile = layeredModel(setting.layer_bytes, 0.4, 0.8);
    LinkModel link = straightLink(1, 1);
    link.all_reduce = randomTable(random, 600);
    std::vector<double> ready;
    std::vector<std::size_t> bytes;
    for (const Gradient& gradient : profile.gradients) {
      ready.push_back(gradient.ready_seconds);
      bytes.push_back(gradient.bytes);
    }
    const BucketProgram program =
        optimalBuckets(ready, bytes, [&](std::size_t size) { return link.all_reduce.seconds(size); });
    const double forward = profile.computeSeconds() - profile.backward_seconds;
    const double step = stepOf(profile, link, "ddp", "program", program.ends);
    ASSERT_NEAR(step, forward + std::max(profile.backward_seconds, program.finish_seconds), 1e-9);
    ASSERT_LE(step, stepOf(profile, link, "ddp", "program", setting.ends) * (1 + 1e-9));
  }
}

TEST(CandidateSimulator, NamesOfKindsDoNotMatter) {
  StepProfile profile = layeredModel({30, 20, 10, 40}, 1, 2);
  const Candidate candidate = withEnds(profile, "dear", "sharded", {1, 3, 4});
  const double step = simulateCandidate(profile, straightLink(1, 0.1), candidate).step_seconds;
  for (Gradient& gradient : profile.gradients) {
    gradient.kind = 7;
  }
  EXPECT_EQ(simulateCandidate(profile, straightLink(1, 0.1), candidate).step_seconds, step);
}

TEST(CandidateSimulator, WhereTheOptimizerRuns) {
  StepProfile profile = layeredModel({10, 10}, 1, 2);
  profile.optimizer_seconds = 4;
  const LinkModel link = straightLink(0, 0);
  EXPECT_DOUBLE_EQ(stepOf(profile, link, "ddp", "program", {2}), 6 + 4);
  EXPECT_DOUBLE_EQ(stepOf(profile, link, "dear", "sharded", {2}), 6 + 1);
  EXPECT_DOUBLE_EQ(stepOf(profile, link, "dear", "replicated", {2}), 6 + 4);
}

TEST(CandidateSimulator, DdpCopiesItsGradientsInAndOut) {
  const StepProfile profile = layeredModel({10, 10}, 1, 2);
  LinkModel link = straightLink(0, 0);
  link.copy_bytes_per_second = 20;
  const Candidate ddp = withEnds(profile, "ddp", "program", {2});
  EXPECT_DOUBLE_EQ(simulateCandidate(profile, link, ddp).step_seconds, 6 + 1 + 1);
  EXPECT_DOUBLE_EQ(simulateCandidate(profile, link, ddp, true).step_seconds, 6);
}

TEST(CandidateSimulator, ExactWaysWaitForTheSlowestRank) {
  StepProfile profile = layeredModel({10, 10}, 1, 2);
  profile.step_samples = {{6}, {6}, {12}, {6}};
  EXPECT_DOUBLE_EQ(stepOf(profile, straightLink(0, 0), "ddp", "program", {2}), 12);
}

TEST(CandidateSimulator, RowsTakeThePlaceOfALayersGradients) {
  StepProfile profile = layeredModel({1000, 1000}, 1, 2);
  profile.layers = {{LayerRows::Kind::kLinear, 2, 5, 5, 4}};  // 80 bytes of rows
  profile.gradients[1].layer = 0;
  LinkModel link = straightLink(0, 0.01);
  link.operations_per_second = 2.0 * 3 * 2 * 25;  // a second more than the own rows
  Candidate rows = withEnds(profile, "ddp", "program", {1});
  rows.factor_layers = {0};
  // The all-reduce of 1000 bytes from 4 to 24, rows to 24.8, the products.
  const Iteration ddp = simulateCandidate(profile, link, rows);
  EXPECT_DOUBLE_EQ(ddp.step_seconds, 24.8 + 1);
  EXPECT_EQ(ddp.timeline.back().activity, Activity::kOptimizer);
  // With dear in either form reduces 10 and 0.8, and the products; the other layer's 10 are gathered.
  rows.way = "dear";
  rows.algorithm = "ring";
  for (const char* form : {"sharded", "replicated"}) {
    rows.form = form;
    EXPECT_DOUBLE_EQ(simulateCandidate(profile, link, rows).step_seconds, 11 + 2 + 10 + 0.8 + 1) << form;
  }
}

TEST(CandidateSimulator, BadInputIsNamed) {
  const StepProfile good = layeredModel({10, 10}, 1, 2);
  const LinkModel link = straightLink(1, 1);
  const auto profile_error = [&](auto change, const char* message) {
    StepProfile profile = good;
    change(profile);
    EXPECT_THROW_MESSAGE(CandidateSimulator(profile, link), std::invalid_argument, message);
  };
  profile_error([](StepProfile& p) { p.gradients.clear(); }, "number of gradients = 0");
  profile_error([](StepProfile& p) { p.forward_seconds[1] = -1; }, "forward_seconds = -1");
  profile_error([](StepProfile& p) { p.optimizer_seconds = -2; }, "optimizer_seconds = -2");
  profile_error([](StepProfile& p) { p.gradients[1].ready_seconds = 5; }, "ready_seconds = 5: allowed at most");
  profile_error([](StepProfile& p) { p.gradients[1].first_use = 2; }, "first_use = 2: allowed -1..1");
  profile_error([](StepProfile& p) { p.gradients[1].layer = 0; }, "layer = 0: allowed -1..-1");
  profile_error([](StepProfile& p) { p.gradients[1].kind = -1; }, "kind = -1");
  profile_error([](StepProfile& p) { p.step_samples = {{1}, {-1}}; }, "step sample = -1");
  Candidate candidate = withEnds(good, "hop", "parallel", {2});
  EXPECT_THROW_MESSAGE(simulateCandidate(good, link, candidate), std::invalid_argument, "way = hop");
  candidate.way = "ddp";
  candidate.buckets = {{0, 2}};
  EXPECT_THROW_MESSAGE(simulateCandidate(good, link, candidate), std::out_of_range, "gradient of a bucket = 2");
  candidate.buckets = {{0}, {}};
  EXPECT_THROW_MESSAGE(simulateCandidate(good, link, candidate), std::invalid_argument, "gradients of a bucket = 0");
  candidate.buckets = {{0, 1}};
  candidate.factor_layers = {0};
  EXPECT_THROW_MESSAGE(simulateCandidate(good, link, candidate), std::out_of_range, "factor layer = 0");
}

}  // namespace
}  // namespace torchext::core::testing
