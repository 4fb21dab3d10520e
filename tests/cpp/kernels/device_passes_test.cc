// The passes of the embedding bag's CUDA kernels, run on the host, against those of the CPU (kernels/cpu/bag_*.h).
//
// Values are small multiples of powers of two, so that sums are exact in any order and the two must agree to the bit
// wherever nothing is divided.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/bag_backward.h"
#include "kernels/cpu/bag_forward.h"
#include "kernels/cpu/bag_sinks.h"
#include "tests/cpp/kernels/host_device.h"

namespace torchext::cuda {
namespace {

#ifdef TORCHEXT_SANITIZED
constexpr int kThreads = 3;
constexpr int kRounds = 25;
#else
constexpr int kThreads = 1;
constexpr int kRounds = 150;
#endif

// The CPU's element of the same bits.
template <class T>
struct HostOf {
  using Type = T;
};
template <>
struct HostOf<Float16> {
  using Type = cpu::Half;
};
template <>
struct HostOf<BFloat16> {
  using Type = cpu::BFloat16;
};

template <class To, class From>
std::vector<To> bitsOf(const std::vector<From>& from) {
  static_assert(sizeof(To) == sizeof(From));
  std::vector<To> to(from.size());
  if (!from.empty()) {
    std::memcpy(static_cast<void*>(to.data()), from.data(), from.size() * sizeof(From));
  }
  return to;
}

template <class T>
double asDouble(T value) {
  return static_cast<double>(Element<T>::load(value));
}

// A random table, batch and gradient, and both ways to look at them.
template <class T>
struct Problem {
  using H = typename HostOf<T>::Type;
  using M = MathOf<T>;

  std::mt19937 random;
  std::int64_t rows;
  int chunks;
  int chunk_dim;
  std::size_t dim;
  std::int32_t slots = 0;
  std::vector<std::int32_t> cells;
  std::vector<std::int64_t> hash;
  core::ChunkIndex index = core::ChunkIndex::identity(0, 1);
  TableView table;
  cpu::BagBatch batch;
  BatchView view;
  std::vector<std::int64_t> ids64;
  std::vector<std::int32_t> ids32;
  std::vector<std::int32_t> offsets32;
  std::vector<T> pool;
  std::vector<T> weights;
  std::vector<T> gradient;
  std::vector<std::int32_t> argmax;
  std::vector<std::uint32_t> bag_of;
  std::vector<double> inverse;

  Problem(unsigned seed, cpu::BagMode mode, bool weighted, bool whole_rows) : random(seed) {
    const auto pick = [&](auto... choices) {
      const int all[] = {choices...};
      return all[random() % std::size(all)];
    };
    rows = pick(1, 6, 50);
    chunks = pick(1, 2, 3, 9);
    chunk_dim = pick(4, 5, 8, 12, 16, 33, 64, 130, 260);
    makeTable(pick(0, 1, 2), whole_rows);
    makeBatch(mode, pick(0, 1, 7, 40, 300));
    pool = numbers(static_cast<std::size_t>(slots) * static_cast<std::size_t>(chunk_dim), 8);
    weights = weighted ? numbers(batch.ids.size(), 2) : std::vector<T>();
    dim = static_cast<std::size_t>(chunks) * static_cast<std::size_t>(chunk_dim);
    gradient = numbers(static_cast<std::size_t>(batch.bags()) * dim, 4);
    argmax.assign(gradient.size(), -1);
    const auto of = batch.bagOf();
    bag_of.assign(of.begin(), of.end());
    inverse = batch.inverseCounts();
    table.aligned = chunk_dim % kQuad == 0;
  }

  void makeTable(int layout, bool whole_rows) {
    const std::int64_t keys = rows * chunks;
    cells.assign(static_cast<std::size_t>(keys), kAbsent);
    for (std::int64_t key = 0; key < keys; ++key) {
      if (layout == 0 || random() % 2 == 0) {
        cells[static_cast<std::size_t>(key)] = slots++;
      }
    }
    table.rows = rows;
    table.chunks = chunks;
    table.chunk_dim = chunk_dim;
    if (layout == 0) {
      index = core::ChunkIndex::identity(rows, chunks);
      if (whole_rows) {  // as the operators do for readers
        index = core::ChunkIndex::identity(rows, 1);
        chunk_dim *= chunks;
        chunks = 1;
        slots = static_cast<std::int32_t>(rows);
        table.chunks = 1;
        table.chunk_dim = chunk_dim;
      }
      return;
    }
    std::shuffle(cells.begin(), cells.end(), random);
    index = core::ChunkIndex::direct(cells, rows, chunks);
    table.layout = core::ChunkIndex::Layout::kDirect;
    table.direct = cells.data();
    if (layout == 1) {
      return;
    }
    hash.assign(core::ChunkIndex::cellsFor(static_cast<std::size_t>(slots)), core::ChunkIndex::kEmpty);
    index = core::ChunkIndex::hashed(hash, rows, chunks);
    for (std::int64_t key = 0; key < keys; ++key) {
      if (cells[static_cast<std::size_t>(key)] != kAbsent) {
        index.insert(key, cells[static_cast<std::size_t>(key)]);
      }
    }
    table.layout = core::ChunkIndex::Layout::kHashed;
    table.hashed = hash.data();
    table.cells = hash.size();
  }

  void makeBatch(cpu::BagMode mode, int bags) {
    const bool square = random() % 3 == 0;
    batch.offsets = {0};
    for (int bag = 0; bag < bags; ++bag) {
      batch.offsets.push_back(batch.offsets.back() + (square ? 4 : static_cast<std::int64_t>(random() % 7)));
    }
    const std::size_t behind = square ? 0 : random() % 3;  // positions that belong to no bag
    for (std::size_t p = 0; p < static_cast<std::size_t>(batch.offsets.back()) + behind; ++p) {
      // Half of them are one row: its run goes through many pieces where the batch is large.
      ids64.push_back(random() % 2 == 0 ? 0 : static_cast<std::int64_t>(random() % static_cast<unsigned>(rows)));
    }
    for (const std::int64_t id : ids64) {
      batch.ids.push_back(static_cast<std::uint32_t>(id));
    }
    batch.padding = random() % 2 == 0 ? -1 : static_cast<std::int64_t>(random() % static_cast<unsigned>(rows));
    batch.mode = mode;
    if (random() % 2 == 0) {
      ids32.assign(ids64.begin(), ids64.end());
      view.ids32 = ids32.data();
    } else {
      view.ids64 = ids64.data();
    }
    if (square) {
      view.bag_size = 4;
    } else if (random() % 2 == 0) {
      offsets32.assign(batch.offsets.begin(), batch.offsets.end());
      view.offsets32 = offsets32.data();
    } else {
      view.offsets64 = batch.offsets.data();
    }
    view.offset_count = square ? 0 : bags + 1;
    view.positions = static_cast<std::int64_t>(ids64.size());
    view.bags = bags;
    view.rows = rows;
    view.padding = batch.padding;
    view.mode = mode;
  }

  std::vector<T> numbers(std::size_t count, int parts) {
    std::vector<T> made(count);
    for (T& value : made) {
      value = Element<T>::store(static_cast<M>(static_cast<int>(random() % 33) - 16) / static_cast<M>(parts));
    }
    return made;
  }

  const T* weightsOrNull() const { return weights.empty() ? nullptr : weights.data(); }

  std::string describe() const {
    return "rows " + std::to_string(rows) + " chunks " + std::to_string(chunks) + " x " + std::to_string(chunk_dim) +
           " layout " + std::to_string(static_cast<int>(table.layout)) + " mode " +
           std::to_string(static_cast<int>(batch.mode)) + " positions " + std::to_string(view.positions);
  }
};

// One unit in the last place of T, or the few that a sum in another order makes in the type that it is computed in;
// `inexact` sums of many numbers that cancel make more (in double they still make none to speak of).
template <class T>
void expectNear(const std::vector<T>& ours, const std::vector<T>& expected, const std::string& what,
                bool inexact = false) {
  const double half = std::is_same_v<T, Float16> ? 0x1p-10 : 0x1p-7;
  const double unit = sizeof(T) == 2 ? half : sizeof(T) == 8 ? 1e-13 : inexact ? 1e-3 : 1e-5;
  ASSERT_EQ(ours.size(), expected.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double right = asDouble(expected[i]);
    if (asDouble(ours[i]) != right) {  // both may be infinite
      ASSERT_NEAR(asDouble(ours[i]), right, unit * std::max(1.0, std::abs(right))) << what << " at " << i;
    }
  }
}

template <class T>
void expectSame(const std::vector<T>& ours, const std::vector<T>& expected, const std::string& what) {
  ASSERT_EQ(ours.size(), expected.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(asDouble(ours[i]), asDouble(expected[i])) << what << " at " << i;
  }
}

template <class T>
class DevicePasses : public testing::Test {};
using Elements = testing::Types<float, double, Float16, BFloat16>;
TYPED_TEST_SUITE(DevicePasses, Elements);

TYPED_TEST(DevicePasses, ForwardIsThatOfTheCpu) {
  using T = TypeParam;
  for (unsigned seed = 0; seed < kRounds; ++seed) {
    const auto mode = static_cast<cpu::BagMode>(seed % 3);
    Problem<T> p(seed, mode, mode == cpu::BagMode::kSum && seed % 2 == 0, true);
    using H = typename Problem<T>::H;
    const bool max = mode == cpu::BagMode::kMax;
    const auto pool = bitsOf<H>(p.pool);
    const auto weights = bitsOf<H>(p.weights);
    std::vector<H> expected(p.gradient.size());
    std::vector<std::int32_t> expected_argmax(max ? expected.size() : 0);
    const cpu::ForwardArgs<H> args{p.batch,         p.index,
                                   pool.data(),     weights.empty() ? nullptr : weights.data(),
                                   expected.data(), expected_argmax.data()};
    cpu::ForwardKernel::run(args, static_cast<std::size_t>(p.chunk_dim), std::int64_t{0}, p.batch.bags());
    std::vector<T> output(expected.size());
    std::vector<std::int32_t> argmax(expected_argmax.size());
    HostDevice device(kThreads);
    runForward<T>(device, {p.view, p.table, p.pool.data(), p.weightsOrNull(), output.data(), argmax.data()});
    expectSame(output, bitsOf<T>(expected), p.describe());
    ASSERT_EQ(argmax, expected_argmax) << p.describe();
  }
}

TYPED_TEST(DevicePasses, WeightGradientIsThatOfTheCpu) {
  using T = TypeParam;
  for (unsigned seed = 0; seed < kRounds; ++seed) {
    Problem<T> p(seed, cpu::BagMode::kSum, true, true);
    using H = typename Problem<T>::H;
    const auto pool = bitsOf<H>(p.pool);
    const auto gradient = bitsOf<H>(p.gradient);
    std::vector<H> expected(p.ids64.size());
    const cpu::WeightGradientArgs<H> args{p.batch, p.index, pool.data(), gradient.data(), expected.data()};
    cpu::WeightGradientKernel::run(args, static_cast<std::size_t>(p.chunk_dim), std::int64_t{0}, p.batch.bags());
    std::vector<T> result(expected.size(), Element<T>::store(7));
    HostDevice device(kThreads);
    runWeightGradient<T>(device, {p.view, p.table, p.pool.data(), p.gradient.data(), result.data()});
    expectSame(result, bitsOf<T>(expected), p.describe());
  }
}

// Everything that a backward pass may write.
template <class T>
struct Written {
  std::vector<T> pool;
  std::vector<MathOf<T>> first;
  std::vector<MathOf<T>> second;
  std::vector<T> values;
  std::vector<std::int64_t> slots;
  std::vector<float> floats;
  std::vector<std::uint8_t> codes;
  std::vector<std::int32_t> cell_keys;
};

enum class Kept { kNone, kFloats, kBytes, kSketch };

constexpr double kLr = 0.125;
constexpr double kEps = 1e-8;

template <class T>
Written<T> startOf(Problem<T>& p, Update kind, Kept utility) {
  using M = MathOf<T>;
  Written<T> w;
  w.pool = p.pool;
  const auto slots = static_cast<std::size_t>(p.slots);
  const std::size_t elements = p.pool.size();
  for (std::size_t i = 0; i < (kind == Update::kAdagrad ? slots : elements); ++i) {
    w.first.push_back(static_cast<M>(p.random() % 8));
    w.second.push_back(static_cast<M>(p.random() % 8));
  }
  w.values.assign(kind == Update::kDense ? elements : 0, T{});
  const std::size_t keys = static_cast<std::size_t>(p.rows) * static_cast<std::size_t>(p.chunks);
  w.floats.assign(utility == Kept::kFloats ? keys : 0, 0.5F);
  w.codes.assign(utility == Kept::kBytes ? keys : 0, 160);
  if (utility == Kept::kSketch) {  // few cells, some of them taken
    w.cell_keys = {-1, 3, -1, 0, 1};
    w.codes.assign(slots + w.cell_keys.size(), 165);
  }
  return w;
}

template <class T, class Sink>
void runOnCpu(const Problem<T>& p, const cpu::GroupedIds& grouped, bool by_frequency, core::ChunkUtility* utility,
              const Sink& sink) {
  using H = typename Problem<T>::H;
  const auto gradient = bitsOf<H>(p.gradient);
  const auto weights = bitsOf<H>(p.weights);
  const bool sketched = utility != nullptr && utility->layout() == core::ChunkUtility::Layout::kSketch;
  std::vector<float> amounts(sketched ? grouped.groups() * static_cast<std::size_t>(p.chunks) : 0);
  const cpu::BackwardArgs<H> args{p.batch,
                                  grouped,
                                  p.index,
                                  gradient.data(),
                                  weights.empty() ? nullptr : weights.data(),
                                  p.argmax.data(),
                                  p.bag_of.data(),
                                  p.inverse.data(),
                                  by_frequency,
                                  utility,
                                  2.0F,
                                  9,
                                  sketched ? amounts.data() : nullptr};
  cpu::BackwardKernel::run(args, static_cast<std::size_t>(p.chunk_dim), sink, std::size_t{0}, grouped.groups());
  for (std::size_t i = 0; i < amounts.size(); ++i) {
    const auto chunk = static_cast<std::int64_t>(i) % p.chunks;
    const std::int64_t row = grouped.idOf(i / static_cast<std::size_t>(p.chunks));
    utility->add(row * p.chunks + chunk, p.table.slotOf(row, static_cast<int>(chunk)), amounts[i], 9);
  }
}

template <class T>
void cpuBackward(const Problem<T>& p, Update kind, bool by_frequency, Written<T>& w) {
  using H = typename Problem<T>::H;
  using M = MathOf<T>;
  const cpu::GroupedIds grouped = cpu::groupIds(p.batch, p.rows);
  core::ChunkUtility utility = !w.floats.empty()      ? core::ChunkUtility::floats(w.floats)
                               : !w.cell_keys.empty() ? core::ChunkUtility::sketch(w.codes, w.cell_keys)
                               : !w.codes.empty()     ? core::ChunkUtility::bytes(w.codes)
                                                      : core::ChunkUtility::none();
  core::ChunkUtility* kept = utility.layout() == core::ChunkUtility::Layout::kNone ? nullptr : &utility;
  const auto lr = static_cast<M>(kLr);
  const auto eps = static_cast<M>(kEps);
  auto pool = bitsOf<H>(w.pool);
  auto values = bitsOf<H>(w.values);
  switch (kind) {
    case Update::kNone:
      runOnCpu(p, grouped, by_frequency, kept, cpu::NoSink<H>{});
      break;
    case Update::kSgd:
      runOnCpu(p, grouped, by_frequency, kept, cpu::SgdSink<H>{pool.data(), lr});
      break;
    case Update::kAdagrad:
      runOnCpu(p, grouped, by_frequency, kept, cpu::AdagradSink<H>{pool.data(), w.first.data(), lr, eps});
      break;
    case Update::kAdam:
      runOnCpu(p, grouped, by_frequency, kept,
               cpu::AdamSink<H>{pool.data(), w.first.data(), w.second.data(), lr, M{0.75}, M{0.5}, eps});
      break;
    case Update::kDense:
      runOnCpu(p, grouped, by_frequency, kept, cpu::DenseSink<H>{values.data()});
      break;
    case Update::kSparse: {
      std::vector<std::int64_t> starts(grouped.groups() + 1);
      std::vector<std::int32_t> found(static_cast<std::size_t>(p.chunks));
      for (std::size_t group = 0; group < grouped.groups(); ++group) {
        starts[group + 1] = starts[group] + p.index.findRow(grouped.idOf(group), found.data());
      }
      w.slots.assign(static_cast<std::size_t>(starts.back()), -1);
      values.resize(w.slots.size() * static_cast<std::size_t>(p.chunk_dim));
      runOnCpu(p, grouped, by_frequency, kept, cpu::SparseSink<H>{starts.data(), w.slots.data(), values.data()});
      break;
    }
  }
  w.pool = bitsOf<T>(pool);
  w.values = bitsOf<T>(values);
}

template <class T>
void deviceBackward(const Problem<T>& p, Update kind, bool by_frequency, Written<T>& w) {
  using M = MathOf<T>;
  HostDevice device(kThreads);
  const WorkspaceSizes sizes{.positions = p.view.positions,
                             .bags = p.view.bags,
                             .dim = p.table.dim(),
                             .sketched = w.cell_keys.empty() ? 0 : p.view.positions * p.chunks,
                             .math_bytes = sizeof(M)};
  std::vector<std::max_align_t> memory(layOut(nullptr, sizes).bytes / sizeof(std::max_align_t) + 1);
  std::memset(memory.data(), 0xFF, memory.size() * sizeof(std::max_align_t));  // whatever is not written is NaN
  const Workspace space = layOut(memory.data(), sizes);
  runGrouping(device, p.view, space);
  BackwardView<T> view{p.batch.mode,
                       p.table,
                       space.runs(p.view),
                       p.gradient.data(),
                       p.weightsOrNull(),
                       p.argmax.data(),
                       static_cast<const M*>(space.inverse),
                       static_cast<M*>(space.partial),
                       by_frequency,
                       {.floats = w.floats.empty() ? nullptr : w.floats.data(),
                        .codes = w.codes.empty() ? nullptr : w.codes.data(),
                        .cell_keys = w.cell_keys.empty() ? nullptr : w.cell_keys.data(),
                        .cell_count = w.cell_keys.size(),
                        .slots = p.slots,
                        .factor = 2.0F,
                        .step = 9},
                       space.grown,
                       {}};
  std::vector<std::int32_t> places(static_cast<std::size_t>(p.view.positions * p.chunks));
  if (kind == Update::kSparse) {
    runMarks(device, view.runs, p.table, places.data());
    std::partial_sum(places.begin(), places.end(), places.begin());
    w.slots.assign(places.empty() ? 0 : static_cast<std::size_t>(places.back()), -1);
    w.values.resize(w.slots.size() * static_cast<std::size_t>(p.chunk_dim));
  }
  view.update.kind = kind;
  view.update.pool = w.pool.data();
  view.update.first = w.first.data();
  view.update.second = w.second.data();
  view.update.rate = static_cast<M>(kLr);
  view.update.beta1 = M{0.75};
  view.update.beta2 = M{0.5};
  view.update.eps = static_cast<M>(kEps);
  view.update.values = w.values.data();
  view.update.slots = w.slots.data();
  view.update.places = places.data();
  runBackward(device, p.view, view, space);
}

TYPED_TEST(DevicePasses, BackwardIsThatOfTheCpu) {
  using T = TypeParam;
  constexpr Update kUpdates[] = {Update::kNone, Update::kSgd,   Update::kAdagrad,
                                 Update::kAdam, Update::kDense, Update::kSparse};
  for (unsigned seed = 0; seed < 2 * kRounds; ++seed) {
    const auto mode = static_cast<cpu::BagMode>(seed % 3);
    const Update kind = kUpdates[seed / 3 % 6];
    const bool by_frequency = mode != cpu::BagMode::kMax && seed % 4 == 0;
    Problem<T> p(seed, mode, mode == cpu::BagMode::kSum && seed % 2 == 0, false);
    if (mode == cpu::BagMode::kMax) {  // as the forward pass leaves it
      std::vector<T> output(p.gradient.size());
      HostDevice device;
      runForward<T>(device, {p.view, p.table, p.pool.data(), nullptr, output.data(), p.argmax.data()});
    }
    const bool inexact = mode == cpu::BagMode::kMean || by_frequency;
    // What a cell holds depends on every amount before: comparable only where nothing is rounded.
    const auto utility = static_cast<Kept>(seed / 5 % (inexact ? 3 : 4));
    Written<T> expected = startOf(p, kind, utility);
    Written<T> ours = expected;
    cpuBackward(p, kind, by_frequency, expected);
    deviceBackward(p, kind, by_frequency, ours);
    const std::string what = p.describe() + " update " + std::to_string(static_cast<int>(kind));
    const bool exact = !inexact && (kind == Update::kSgd || kind == Update::kDense || kind == Update::kSparse);
    if (exact) {
      expectSame(ours.pool, expected.pool, what);
      expectSame(ours.values, expected.values, what);
    } else {
      expectNear(ours.pool, expected.pool, what, inexact);
      expectNear(ours.values, expected.values, what, inexact);
    }
    expectNear(ours.first, expected.first, what, inexact);
    expectNear(ours.second, expected.second, what, inexact);
    ASSERT_EQ(ours.slots, expected.slots) << what;
    expectNear(ours.floats, expected.floats, what, inexact);
    ASSERT_EQ(ours.cell_keys, expected.cell_keys) << what;
    for (std::size_t i = 0; i < ours.codes.size(); ++i) {  // where roundings differ, so may the code by one
      ASSERT_LE(std::abs(ours.codes[i] - expected.codes[i]), 1) << what;
    }
  }
}

TYPED_TEST(DevicePasses, RenormBringsEachRowDownOnce) {
  using T = TypeParam;
  for (unsigned seed = 0; seed < kRounds; ++seed) {
    Problem<T> p(seed, cpu::BagMode::kSum, false, true);
    const double norm_type = std::vector<double>{1, 2, 3, std::numeric_limits<double>::infinity()}[seed % 4];
    constexpr double kMostNorm = 1.5;
    std::vector<T> expected = p.pool;
    std::vector<bool> done(static_cast<std::size_t>(p.rows));
    for (const std::int64_t row : p.ids64) {
      if (done[static_cast<std::size_t>(row)]) {
        continue;
      }
      done[static_cast<std::size_t>(row)] = true;
      std::vector<T*> values;
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        const std::int32_t slot = p.index.find(row * p.chunks + chunk);
        for (int i = 0; slot != kAbsent && i < p.chunk_dim; ++i) {
          values.push_back(&expected[static_cast<std::size_t>(slot) * static_cast<std::size_t>(p.chunk_dim) +
                                     static_cast<std::size_t>(i)]);
        }
      }
      double sum = 0;
      double largest = 0;
      for (const T* value : values) {
        sum += std::pow(std::abs(asDouble(*value)), norm_type);
        largest = std::max(largest, std::abs(asDouble(*value)));
      }
      const double norm = std::isinf(norm_type) ? largest : std::pow(sum, 1 / norm_type);
      for (T* value : values) {
        const double scaled = asDouble(*value) * kMostNorm / (norm + 1e-7);
        *value = norm > kMostNorm ? Element<T>::store(static_cast<MathOf<T>>(scaled)) : *value;
      }
    }
    BatchView ids = p.view;
    ids.offsets32 = nullptr;
    ids.offsets64 = nullptr;
    ids.offset_count = 0;
    ids.bag_size = 1;
    ids.bags = ids.positions;
    ids.padding = -1;
    const WorkspaceSizes sizes{.positions = ids.positions};
    std::vector<std::max_align_t> memory(layOut(nullptr, sizes).bytes / sizeof(std::max_align_t) + 1);
    const Workspace space = layOut(memory.data(), sizes);
    HostDevice device(kThreads);
    runGrouping(device, ids, space);
    runRenorm<T>(device, {space.runs(ids), p.table, p.pool.data(), kMostNorm, norm_type});
    expectNear(p.pool, expected, p.describe());
  }
}

// Ids and offsets that are out of range lead no pass out of its memory (which the address sanitizer watches), and what
// they touch is left out.
TEST(DevicePassesOnBadBatches, TouchNothing) {
  const std::vector<std::int64_t> ids{1, 99, -5, 2, std::int64_t{1} << 40, 0};
  const std::vector<std::vector<std::int64_t>> many{{0, 3}, {2, 1}, {-7, 50}, {0, std::int64_t{1} << 50}, {3, 3, 3, 3}};
  for (const std::vector<std::int64_t>& offsets : many) {
    BatchView view;
    view.ids64 = ids.data();
    view.positions = 6;
    view.offsets64 = offsets.data();
    view.offset_count = view.bags = static_cast<std::int64_t>(offsets.size());
    view.rows = 3;
    TableView table;
    table.rows = 3;
    table.chunk_dim = 4;
    table.aligned = true;
    alignas(16) float pool[12] = {1, 1, 1, 1, 10, 10, 10, 10, 100, 100, 100, 100};
    const auto bags = static_cast<std::size_t>(view.bags);
    std::vector<float> output(bags * 4);
    HostDevice device;
    runForward<float>(device, {view, table, pool, nullptr, output.data(), nullptr});
    if (offsets[1] == 3) {
      EXPECT_EQ(output[0], offsets[0] == 0 ? 10 : 0);
    }
    const std::vector<float> gradient(output.size(), 1);
    std::vector<float> weight_gradient(6);
    runWeightGradient<float>(device, {view, table, pool, gradient.data(), weight_gradient.data()});
    EXPECT_EQ(weight_gradient[1], 0);
    EXPECT_EQ(weight_gradient[4], 0);
    const WorkspaceSizes sizes{.positions = 6, .bags = view.bags, .dim = 4, .sketched = 6, .math_bytes = 4};
    std::vector<std::max_align_t> memory(layOut(nullptr, sizes).bytes / sizeof(std::max_align_t) + 1);
    const Workspace space = layOut(memory.data(), sizes);
    runGrouping(device, view, space);
    std::uint8_t codes[4] = {};
    std::int32_t key = -1;
    BackwardView<float> backward{view.mode, table,   space.runs(view), gradient.data(),
                                 nullptr,   nullptr, nullptr,          nullptr,
                                 false,     {},      nullptr,          {}};
    backward.partial = static_cast<float*>(space.partial);
    backward.utility.codes = codes;
    backward.utility.cell_keys = &key;
    backward.utility.cell_count = 1;
    backward.utility.slots = 3;
    backward.grown = space.grown;
    backward.update.kind = Update::kSgd;
    backward.update.pool = pool;
    backward.update.rate = 1;
    runBackward(device, view, backward, space);
    EXPECT_EQ(key, -1);
  }
}

}  // namespace
}  // namespace torchext::cuda
