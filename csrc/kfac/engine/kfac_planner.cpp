#include "kfac/engine/kfac_planner.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "kfac/base/scoped_timer.h"
#include "kfac/engine/timed_examples.h"
#include "kfac/precondition/per_sample_plan.h"
#include "kfac/precondition/preconditioner.h"

namespace torchext {

KfacPlanner::KfacPlanner(KfacContext& context, const FactorAccumulator& accumulator)
    : context_(context), accumulator_(accumulator), tiles_(allHaveTiles()) {
  measureInversions();
  measureProducts();
  describeModel();
  const KfacOptions& options = context_.options;
  plan_ = core::makeKfacPlan(core::parseKfacStrategy(options.strategy), input_);
  // Who asks for rows has no shares without asking for them.
  const bool split = options.split_directions.value_or(plan_.split_directions && options.gather_rows != true);
  plan_.split_directions = split && context_.ranks > 1;
}

// Replicas stay equal only where all ranks round alike.
bool KfacPlanner::allHaveTiles() const {
  const KfacOptions& options = context_.options;
  const bool used = std::any_of(context_.layers.begin(), context_.layers.end(),
                                [&](const auto& spec) { return Preconditioner::usesTiles(spec, options.form); });
  const bool here = used && options.precision == ProductPrecision::kHigh && !context_.on_device &&
                    accumulator_.type() == at::kFloat && TiledProduct::available();
  return context_.comm ? context_.comm->mean(here ? 1 : 0) > 1 - 0.5 / context_.ranks : here;
}

void KfacPlanner::describeModel() {
  const KfacOptions& options = context_.options;
  const auto width = c10::elementSize(accumulator_.type());
  for (const FactorLayout& layout : accumulator_.layouts()) {
    input_.tasks.push_back({layout.layer, static_cast<std::size_t>(layout.dim), static_cast<std::size_t>(layout.count),
                            static_cast<std::size_t>(layout.size) * width,
                            static_cast<std::size_t>(layout.inverseElements(options.form)) * width, layout.diagonal});
  }
  for (const KfacLayerSpec& spec : context_.layers) {
    input_.gradient_bytes.push_back(static_cast<std::size_t>(spec.elements()) * width);
  }
  // Where rows come in step(), their directions are not ahead of anything.
  for (int layer = 0; context_.comm && context_.overlaps() && layer < context_.layerCount(); ++layer) {
    input_.of_rows.push_back(PerSamplePlan::suits(context_, layer));
  }
  input_.ranks = context_.ranks;
  input_.steps_per_inverse = options.inverse_update_steps;
  input_.worker_fraction = options.worker_fraction;
  input_.bucket_cap_bytes = static_cast<std::size_t>(options.bucket_cap_mb * (1 << 20));
}

void KfacPlanner::measureInversions() {
  // Sizes of the model's own factors, up to one that takes some milliseconds; beyond it the fit's cubic holds.
  constexpr std::int64_t kLargest = 512;
  std::set<std::int64_t> dims{16, 64};
  for (const FactorLayout& layout : accumulator_.layouts()) {
    if (!layout.diagonal) {
      dims.insert(std::min(layout.dim, kLargest));
    }
  }
  while (dims.size() > 3) {
    dims.erase(std::next(dims.begin()));  // keeps the largest ones, which weigh most
  }
  if (!context_.comm) {
    dims = {16, 64};
  }
  std::vector<core::InversionSample> samples;
  std::vector<double> seconds;
  at::Generator generator = at::detail::createCPUGenerator(/*seed_val=*/1);  // the script's numbers stay its own
  for (const std::int64_t dim : dims) {
    samples.push_back({static_cast<std::size_t>(dim), 0});
    // The script waits, and what takes longer varies less.
    constexpr double kEnough = 1e-3;  // seconds for one size
    seconds.push_back(secondsOf(exampleInversion(context_, accumulator_, dim, generator), kEnough, /*most=*/3));
  }
  if (context_.comm) {
    for (double& taken : seconds) {
      taken = typicalSeconds(taken);
    }
    seconds = context_.comm->fromRankZero(seconds);
    const auto width = c10::elementSize(accumulator_.type());
    context_.comm->measure(context_.device, static_cast<std::size_t>(accumulator_.elements()) * width, input_.costs);
  }
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].seconds = std::max(seconds[i], 1e-9);
  }
  input_.costs.inversion = core::fitInversion(samples);
}

// Of one of the things that calls of `work` do: so many calls as `window` seconds hold, at most `most`. All ranks
// compute at once, as they will: for a turn or two of those which share a processor, and are in each other's way.
double KfacPlanner::secondsOf(const std::function<int()>& work, double window, int most) const {
  if (context_.comm) {
    context_.comm->mean(0);  // all begin together
  }
  double spent = 0;
  int done = 0;
  for (int call = 0; call < most && spent < window; ++call) {
    waitForDevice(context_.device);
    const double start = monotonicSeconds();
    done += work();
    waitForDevice(context_.device);
    spent += monotonicSeconds() - start;
  }
  return spent / done;
}

// Each product only where there is a layer for it: the script waits.
void KfacPlanner::measureProducts() {
  const InverseForm form = context_.options.form;
  double on_tiles = 0;
  double by_blas = 0;
  for (const KfacLayerSpec& spec : context_.layers) {
    const bool tiled = tiles_ && Preconditioner::usesTiles(spec, form);
    double& product = tiled ? on_tiles : by_blas;
    product = product > 0 ? product : secondsOfProduct(tiled);
    const auto out = static_cast<double>(spec.outputs());
    const auto in = static_cast<double>(spec.inputDim());
    const double diagonal = spec.diagonalInput() ? out * in : out * in * in;
    const double factor = form == InverseForm::kEigen ? 2 : 1;
    input_.precondition.push_back(factor * static_cast<double>(spec.groups) * (out * out * in + diagonal) * product);
  }
}

// Of a multiplication and an addition in a product of a common size. (Four ranks on two cores spread by 10 to 25 %, and
// by as much with a window of 20 ms.)
double KfacPlanner::secondsOfProduct(bool tiles) const {
  constexpr std::int64_t kSize = 192;
  constexpr double kWindow = 0.005;  // seconds
  const std::function<int()> products = exampleProducts(context_, accumulator_.options(), kSize, tiles);
  products();
  const double product = secondsOf(products, kWindow, std::numeric_limits<int>::max());
  const double seconds = product / static_cast<double>(kSize * kSize * kSize);
  // The mean may differ in its last bit from rank to rank, and plans may not.
  return context_.comm ? context_.comm->fromRankZero({typicalSeconds(seconds)}).front() : seconds;
}

// Of what all ranks have timed at once, by the mean of their speeds: where more ranks than processors share a host, one
// may have slept through all of its measurement, and its seconds would be most of a mean.
double KfacPlanner::typicalSeconds(double seconds) const {
  return 1 / context_.comm->mean(1 / std::max(seconds, 1e-12));
}

}  // namespace torchext
