// Time of one request with its completion, without stragglers: every worker of a round asks, then all groups are
// finished.
//   group_generator_bench --benchmark_repetitions=5 --benchmark_report_aggregates_only
#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/prague/group_generator.h"

namespace {

using torchext::core::Delivery;
using torchext::core::GeneratorKind;
using torchext::core::GeneratorOptions;

void request(benchmark::State& state, GeneratorKind kind) {
  GeneratorOptions options;
  options.world_size = static_cast<int>(state.range(0));
  options.group_size = 4;
  options.kind = kind;
  options.slowdown_threshold = 4;
  for (int rank = 0; rank < options.world_size; ++rank) {
    options.host_of.push_back(rank / 8);
  }
  const auto generator = torchext::core::makeGroupGenerator(options);
  double now = 0;
  std::vector<bool> waiting(static_cast<std::size_t>(options.world_size), false);
  std::int64_t requests = 0;
  std::vector<Delivery> running;
  std::vector<Delivery> next;
  for (auto _ : state) {
    for (int worker = 0; worker < options.world_size; ++worker) {
      if (waiting[static_cast<std::size_t>(worker)]) {
        continue;
      }
      waiting[static_cast<std::size_t>(worker)] = true;
      ++requests;
      now += 1e-3;
      for (auto& delivery : generator->request(worker, now)) {
        running.push_back(std::move(delivery));
      }
    }
    if (const auto deadline = generator->nextDeadline()) {
      now = std::max(now, *deadline);
      for (auto& delivery : generator->tick(now)) {
        running.push_back(std::move(delivery));
      }
    }
    next.clear();
    for (const auto& delivery : running) {
      waiting[static_cast<std::size_t>(delivery.worker)] = false;
      for (auto& more : generator->complete(delivery.worker, delivery.group.id, now)) {
        next.push_back(std::move(more));
      }
    }
    running.swap(next);
  }
  state.SetItemsProcessed(requests);
  state.counters["per_request"] =
      benchmark::Counter(static_cast<double>(requests), benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void worlds(benchmark::internal::Benchmark* bench) { bench->Arg(8)->Arg(64)->Arg(1024); }

BENCHMARK_CAPTURE(request, random, GeneratorKind::kRandom)->Apply(worlds);
BENCHMARK_CAPTURE(request, division, GeneratorKind::kDivision)->Apply(worlds);
BENCHMARK_CAPTURE(request, smart, GeneratorKind::kSmart)->Apply(worlds);
BENCHMARK_CAPTURE(request, ready_set, GeneratorKind::kReadySet)->Apply(worlds);

}  // namespace

BENCHMARK_MAIN();
