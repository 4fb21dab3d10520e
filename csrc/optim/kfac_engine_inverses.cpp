// What KfacEngine does in steps that update inverses, and how results reach the ranks that need them; checkpoints.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "core/check.h"
#include "core/packed_triangle.h"
#include "optim/kfac_engine.h"

namespace torchext {
namespace {

using core::FactorExchange;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class Body>
void withType(at::ScalarType type, const Body& body) {
  if (type == at::kDouble) {  // NOLINT(bugprone-branch-clone): the types differ
    body(double());
  } else {
    body(float());
  }
}

// [count, d, d] from packed triangles; a diagonal as it is.
at::Tensor unpacked(const at::Tensor& packed, const FactorSlot& slot) {
  if (slot.diagonal) {
    return packed.clone();
  }
  at::Tensor full = at::empty({slot.count, slot.dim, slot.dim}, packed.options());
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = packed.const_data_ptr<T>();
    T* to = full.mutable_data_ptr<T>();
    const auto dim = static_cast<std::size_t>(slot.dim);
    for (std::int64_t group = 0; group < slot.count; ++group) {
      core::unpackTriangle(from + group * slot.triangle(), dim, to + group * slot.dim * slot.dim, dim);
    }
  });
  return full;
}

std::int64_t inverseElements(const FactorSlot& slot, InverseForm form) {
  if (slot.diagonal || form == InverseForm::kInverse) {
    return slot.size;
  }
  return slot.count * slot.dim * (slot.dim + 1);
}

// Traces of the groups of a packed factor.
at::Tensor tracesOf(const at::Tensor& packed, const FactorSlot& slot) {
  at::Tensor traces = at::empty({slot.count}, at::kDouble);
  withType(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = packed.const_data_ptr<T>();
    for (std::int64_t group = 0; group < slot.count; ++group) {
      const T* triangle = from + group * slot.triangle();
      traces.mutable_data_ptr<double>()[group] =
          slot.diagonal ? static_cast<double>(std::accumulate(triangle, triangle + slot.dim, T(0)))
                        : static_cast<double>(core::packedTrace(triangle, static_cast<std::size_t>(slot.dim)));
    }
  });
  return traces;
}

}  // namespace

void KfacEngine::measureCosts() {
  // Sizes of the model's own factors, up to one that takes some milliseconds; beyond it the fit's cubic holds.
  constexpr std::int64_t kLargest = 512;
  std::set<std::int64_t> dims{16, 64};
  for (const FactorSlot& slot : statistics_.slots()) {
    if (!slot.diagonal) {
      dims.insert(std::min(slot.dim, kLargest));
    }
  }
  while (dims.size() > 5) {
    dims.erase(std::next(dims.begin(), 2));  // keeps the largest ones, which weigh most
  }
  if (!exchange_) {
    dims = {16, 64};
  }
  std::vector<core::InversionSample> samples;
  std::vector<double> seconds;
  for (const std::int64_t dim : dims) {
    const at::Tensor noise = at::arange(dim * dim, at::kFloat).mul_(0.7548776662).sin_().view({dim, dim});
    const at::Tensor factor = at::mm(noise, noise.t()).div_(static_cast<double>(dim)).to(statistics_.type());
    const at::Tensor batch = factor.unsqueeze(0);
    const at::Tensor damping = at::full({1}, 0.1, factor.options());
    InverseFailures ignored;
    double best = std::numeric_limits<double>::infinity();
    for (int repeat = 0; repeat < 3; ++repeat) {
      const double start = now();
      if (options_.form == InverseForm::kInverse) {
        invertFactor(batch.clone(), damping, ignored);
      } else {
        decomposeFactor(batch, ignored);
      }
      best = std::min(best, now() - start);
    }
    samples.push_back({static_cast<std::size_t>(dim), 0});
    seconds.push_back(best);
  }
  if (exchange_) {
    seconds = exchange_->fromRankZero(seconds);
    std::vector<core::CommSample> all_reduce;
    std::vector<core::CommSample> broadcast;
    exchange_->measure(all_reduce, broadcast);
    input_.costs.all_reduce = core::fitAlphaBeta(all_reduce);
    input_.costs.broadcast = core::fitAlphaBeta(broadcast);
  }
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].seconds = std::max(seconds[i], 1e-9);
  }
  input_.costs.inversion = core::fitInversion(samples);

  // What a product costs, by one of a common size; all ranks work at once, as they will.
  constexpr std::int64_t kSize = 192;
  const at::Tensor square = at::ones({kSize, kSize}, at::TensorOptions(statistics_.type()));
  double product = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < 4; ++repeat) {
    const double start = now();
    const at::Tensor result = at::mm(square, square);
    product = std::min(product, now() - start);
  }
  product /= static_cast<double>(kSize * kSize * kSize);
  if (exchange_) {
    product = exchange_->fromRankZero({product}).front();
  }
  for (const KfacLayerSpec& spec : layers_) {
    const auto out = static_cast<double>(spec.outputs());
    const auto in = static_cast<double>(spec.inputDim());
    const double diagonal = spec.diagonalInput() ? out * in : out * in * in;
    const double form = options_.form == InverseForm::kEigen ? 2 : 1;
    input_.precondition.push_back(form * static_cast<double>(spec.groups) * (out * out * in + diagonal) * product);
  }
}

void KfacEngine::makePlan() {
  const auto& slots = statistics_.slots();
  const auto width = c10::elementSize(statistics_.type());
  for (const FactorSlot& slot : slots) {
    input_.tasks.push_back({slot.layer, static_cast<std::size_t>(slot.dim), static_cast<std::size_t>(slot.count),
                            static_cast<std::size_t>(slot.size) * width,
                            static_cast<std::size_t>(inverseElements(slot, options_.form)) * width, slot.diagonal});
  }
  for (const KfacLayerSpec& spec : layers_) {
    input_.gradient_bytes.push_back(static_cast<std::size_t>(spec.groups * spec.outputs() * spec.inputDim()) * width);
  }
  input_.ranks = ranks_;
  input_.steps_per_inverse = options_.inverse_update_steps;
  input_.worker_fraction = options_.worker_fraction;
  input_.max_run_bytes = static_cast<std::size_t>(options_.max_run_mb * (1 << 20));
  plan_ = core::makeKfacPlan(core::parseKfacStrategy(options_.strategy), input_);
  plan_.split_directions = options_.split_directions.value_or(plan_.split_directions) && ranks_ > 1;

  // Directions that few ranks compute lie together by owner, and so do inverses that travel.
  std::vector<int> order(layers_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int layer) {
    const auto i = static_cast<std::size_t>(layer);
    return plan_.workers[i] < ranks_ ? plan_.layer_owner[i] : ranks_;
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) < key(b); });
  std::vector<int> parts(layers_.size(), 1);
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (plan_.split_directions && plan_.workers[layer] == ranks_ &&
        KfacDirections::splits(layers_[layer], options_.form)) {
      parts[layer] = ranks_;
    }
  }
  directions_ = std::make_unique<KfacDirections>(layers_, statistics_.type(), order, parts);
  inverse_place_.assign(slots.size(), -1);
  std::int64_t elements = 0;
  for (int owner = 0; owner < ranks_; ++owner) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const bool travels = !plan_.factors[i].everyone_inverts && plan_.workers[core::index(slots[i].layer)] > 1;
      if (travels && plan_.factors[i].owner == owner) {
        inverse_place_[i] = elements;
        elements += inverseElements(slots[i], options_.form);
      }
    }
  }
  if (elements > 0) {
    inverse_buffer_ = at::empty({elements}, at::TensorOptions(statistics_.type()));
  }
  if (exchange_) {
    payload_ = at::empty({statistics_.elements()}, at::TensorOptions(statistics_.type()));
  }
}

bool KfacEngine::invertsHere(std::size_t slot) const {
  return plan_.factors[slot].everyone_inverts || plan_.factors[slot].owner == rank_;
}

bool KfacEngine::worksOn(int layer) const {
  const auto i = core::index(layer);
  return core::KfacPlan::isWorker(rank_, plan_.layer_owner[i], plan_.workers[i], ranks_);
}

// The mean over ranks, once it has come; of this rank alone without a group.
at::Tensor KfacEngine::meanFactor(std::size_t slot) const {
  const FactorSlot& place = statistics_.slots()[slot];
  if (!exchange_) {
    return statistics_.slice(statistics_.running(), place);
  }
  const at::Tensor sum = statistics_.slice(payload_, place);
  return plan_.factors[slot].exchange == FactorExchange::kOwnersOwn ? sum : sum / ranks_;
}

// Of every slot, the mean over ranks. A rank that owns one factor of a layer may not have the other; only then are
// they sent.
std::vector<at::Tensor> KfacEngine::traces() {
  const auto& slots = statistics_.slots();
  bool apart = false;
  for (std::size_t i = 0; i + 1 < slots.size(); i += 2) {
    apart = apart || (plan_.factors[i].exchange == FactorExchange::kReduceToOwner &&
                      plan_.factors[i].owner != plan_.factors[i + 1].owner);
  }
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    // payload holds sums of all ranks where they were all-reduced, else what is local is used until it is summed.
    const at::Tensor packed = apart ? statistics_.slice(statistics_.running(), slots[i]) : meanFactor(i);
    result.push_back(tracesOf(packed, slots[i]));
  }
  if (apart) {
    const at::Tensor all = at::cat(result);
    exchange_->allReduce(all)->wait();
    all.div_(ranks_);
    std::int64_t offset = 0;
    for (at::Tensor& traces : result) {
      traces = all.narrow(0, offset, traces.numel());
      offset += traces.numel();
    }
  }
  return result;
}

void KfacEngine::invert(std::size_t slot, const std::vector<at::Tensor>& traces) {
  const FactorSlot& place = statistics_.slots()[slot];
  const double start = now();
  const at::Tensor factor = unpacked(meanFactor(slot), place);
  FactorInverse inverse;
  if (options_.form == InverseForm::kEigen) {
    inverse = place.diagonal ? FactorInverse{factor.clamp_min(0), {}} : decomposeFactor(factor, stats_.failures);
  } else {
    // Factored Tikhonov: pi balances the damping of the two factors by their mean eigenvalues.
    const std::size_t other = slot ^ 1U;  // the layer's other factor
    const auto other_dim = static_cast<double>(statistics_.slots()[other].dim);
    const at::Tensor own_mean = traces[slot] / static_cast<double>(place.dim);
    const at::Tensor other_mean = traces[other] / other_dim;
    at::Tensor pi = at::sqrt(own_mean / other_mean);
    pi = at::where(at::isfinite(pi).logical_and(pi > 0), pi, at::ones_like(pi));
    const at::Tensor damping = (pi * std::sqrt(options_.damping)).to(factor.scalar_type());
    inverse = place.diagonal ? FactorInverse{(factor + damping).reciprocal(), {}}
                             : invertFactor(factor, damping, stats_.failures);
  }
  if (inverse.defined()) {
    inverses_[slot] = std::move(inverse);
  }
  stats_.invert_seconds += now() - start;
}

void KfacEngine::updateInverses() {
  const auto& slots = statistics_.slots();
  const bool inverting = stats_.steps % options_.inverse_update_steps == 0;
  const bool with_traces = options_.form == InverseForm::kInverse;
  bool at_once = !with_traces;  // whether a run can be inverted as it comes: pi needs both factors of a layer
  if (exchange_) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      prepare(i, /*merged=*/true);
    }
    startRuns(/*overlapped=*/false);
  }
  std::vector<at::Tensor> traces_of;
  const auto invert_run = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      if (inverting && invertsHere(i)) {
        invert(i, traces_of);
      }
    }
  };
  std::size_t begin = 0;
  for (std::size_t run = 0; exchange_ && run < works_.size(); ++run) {
    const double start = now();
    if (works_[run]) {
      works_[run]->wait();
    }
    stats_.exchange_wait_seconds += now() - start;
    if (at_once) {
      invert_run(begin, core::index(plan_.fusion_ends[run]));
      begin = core::index(plan_.fusion_ends[run]);
    }
  }
  works_.clear();
  started_ = 0;
  std::fill(prepared_.begin(), prepared_.end(), false);
  if (!inverting) {
    return;
  }
  if (with_traces) {
    traces_of = traces();
  }
  invert_run(begin, slots.size());
  distributeInverses();
  ++stats_.inverse_updates;
}

// Starts what brings `owner`'s slice to the ranks that need it: its inverses to the workers, or directions from the
// workers to the others.
void KfacEngine::route(const at::Tensor& slice, int owner, int workers, bool to_workers,
                       std::vector<KfacExchange::Work>& works) {
  using core::KfacPlan;
  if (to_workers ? workers == ranks_ : workers == 1) {
    works.push_back(exchange_->broadcast(slice, owner));
    return;
  }
  const int tag = 2 * owner + (to_workers ? 1 : 0);
  for (int rank = 0; rank < ranks_; ++rank) {
    const bool worker = KfacPlan::isWorker(rank, owner, workers, ranks_);
    if (rank == owner || worker != to_workers) {
      continue;
    }
    const int from = to_workers ? owner : KfacPlan::serverOf(rank, owner, workers, ranks_);
    if (from == rank_) {
      works.push_back(exchange_->send(slice, rank, tag));
    } else if (rank == rank_) {
      works.push_back(exchange_->receive(slice, from, tag));
    }
  }
}

void KfacEngine::packInverse(std::size_t slot) {
  const FactorSlot& place = statistics_.slots()[slot];
  const at::Tensor to = inverse_buffer_.narrow(0, inverse_place_[slot], inverseElements(place, options_.form));
  const FactorInverse& inverse = inverses_[slot];
  if (!inverse.defined()) {
    to.fill_(std::numeric_limits<double>::quiet_NaN());  // never made: receivers have none either
  } else if (place.diagonal) {
    to.copy_(inverse.matrix);
  } else if (options_.form == InverseForm::kEigen) {
    to.narrow(0, 0, inverse.values.numel()).copy_(inverse.values.flatten());
    to.narrow(0, inverse.values.numel(), inverse.matrix.numel()).copy_(inverse.matrix.flatten());
  } else {
    withType(to.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      const auto dim = static_cast<std::size_t>(place.dim);
      for (std::int64_t group = 0; group < place.count; ++group) {
        core::packTriangle(inverse.matrix.const_data_ptr<T>() + group * place.dim * place.dim, dim, dim,
                           to.mutable_data_ptr<T>() + group * place.triangle());
      }
    });
  }
}

void KfacEngine::unpackInverse(std::size_t slot) {
  const FactorSlot& place = statistics_.slots()[slot];
  const at::Tensor from = inverse_buffer_.narrow(0, inverse_place_[slot], inverseElements(place, options_.form));
  if (std::isnan(from.select(0, 0).item<double>())) {
    return;
  }
  if (place.diagonal || options_.form == InverseForm::kInverse) {
    inverses_[slot] = {unpacked(from, place), {}};
    return;
  }
  const std::int64_t values = place.count * place.dim;
  inverses_[slot] = {from.narrow(0, values, from.numel() - values).clone().view({place.count, place.dim, place.dim}),
                     from.narrow(0, 0, values).clone().view({place.count, place.dim})};
}

void KfacEngine::distributeInverses() {
  if (!inverse_buffer_.defined()) {
    return;
  }
  const double start = now();
  const auto& slots = statistics_.slots();
  std::vector<KfacExchange::Work> works;
  for (int owner = 0; owner < ranks_; ++owner) {
    std::int64_t begin = -1;
    std::int64_t end = 0;
    int workers = ranks_;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (inverse_place_[i] < 0 || plan_.factors[i].owner != owner) {
        continue;
      }
      begin = begin < 0 ? inverse_place_[i] : begin;
      end = inverse_place_[i] + inverseElements(slots[i], options_.form);
      workers = plan_.workers[core::index(slots[i].layer)];
      if (owner == rank_) {
        packInverse(i);
      }
    }
    if (begin >= 0) {
      route(inverse_buffer_.narrow(0, begin, end - begin), owner, workers, /*to_workers=*/true, works);
    }
  }
  KfacExchange::wait(works);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (inverse_place_[i] >= 0 && plan_.factors[i].owner != rank_ && worksOn(slots[i].layer)) {
      unpackInverse(i);
    }
  }
  stats_.distribute_seconds += now() - start;
}

void KfacEngine::distributeDirections() {
  if (!exchange_) {
    return;
  }
  const double start = now();
  std::vector<KfacExchange::Work> works;
  for (int owner = 0; owner < ranks_; ++owner) {
    at::Tensor slice;
    int workers = ranks_;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (plan_.workers[layer] == ranks_ || plan_.layer_owner[layer] != owner) {
        continue;
      }
      workers = plan_.workers[layer];
      const at::Tensor own = directions_->slice(static_cast<int>(layer));
      slice = !slice.defined() ? own
                               : slice.as_strided({own.storage_offset() + own.numel() - slice.storage_offset()}, {1},
                                                  slice.storage_offset());
    }
    if (slice.defined()) {
      route(slice, owner, workers, /*to_workers=*/false, works);
    }
    const at::Tensor share = directions_->splitSlice(owner);
    if (share.numel() > 0) {
      works.push_back(exchange_->broadcast(share, owner));
    }
  }
  KfacExchange::wait(works);
  stats_.distribute_seconds += now() - start;
}

std::vector<FactorState> KfacEngine::state() {
  const at::NoGradGuard no_grad;
  const Lock lock(mutex_);
  const auto& slots = statistics_.slots();
  at::Tensor mean = statistics_.running().clone();
  if (exchange_) {
    exchange_->allReduce(mean)->wait();
    mean.div_(ranks_);
  }
  std::vector<FactorState> result;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (plan_.factors[i].exchange == FactorExchange::kOwnersOwn && exchange_) {
      const at::Tensor own =
          statistics_.slice(mean, slots[i]).copy_(statistics_.slice(statistics_.running(), slots[i]));
      exchange_->broadcast(own, plan_.factors[i].owner)->wait();
    }
    FactorState state{statistics_.slice(mean, slots[i]).clone(), {}, {}};
    FactorInverse inverse = inverses_[i];
    if (exchange_) {
      // Everyone takes the owner's, whatever it has itself.
      const int owner = plan_.factors[i].everyone_inverts ? 0 : plan_.factors[i].owner;
      const at::Tensor has = at::full({1}, inverse.defined() ? 1 : 0, at::kLong);
      exchange_->broadcast(has, owner)->wait();
      const auto options = at::TensorOptions(statistics_.type());
      if (has.item<std::int64_t>() == 0) {
        inverse = {};
      } else if (owner != rank_) {
        inverse.matrix = slots[i].diagonal ? at::empty({slots[i].dim}, options)
                                           : at::empty({slots[i].count, slots[i].dim, slots[i].dim}, options);
        inverse.values = slots[i].diagonal || options_.form == InverseForm::kInverse
                             ? at::Tensor()
                             : at::empty({slots[i].count, slots[i].dim}, options);
      }
      if (inverse.defined()) {
        exchange_->broadcast(inverse.matrix, owner)->wait();
        if (inverse.values.defined()) {
          exchange_->broadcast(inverse.values, owner)->wait();
        }
      }
    }
    if (inverse.defined()) {
      state.matrix = inverse.matrix.clone();
      state.values = inverse.values.defined() ? inverse.values.clone() : at::Tensor();
    }
    result.push_back(std::move(state));
  }
  return result;
}

void KfacEngine::load(const std::vector<FactorState>& state, std::int64_t steps, std::int64_t factor_updates) {
  const at::NoGradGuard no_grad;
  const Lock lock(mutex_);
  drop(started_ > 0);
  const auto& slots = statistics_.slots();
  TORCH_CHECK_VALUE(state.size() == slots.size(), "the state has ", state.size(), " factors, the model ", slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const bool used = worksOn(slots[i].layer) || invertsHere(i);
    statistics_.slice(statistics_.running(), slots[i]).copy_(state[i].factor);
    inverses_[i] = {};
    if (used && state[i].matrix.defined()) {
      const auto copy = [&](const at::Tensor& from) {
        return from.defined() ? from.to(statistics_.type(), false, true).contiguous() : at::Tensor();
      };
      inverses_[i] = {copy(state[i].matrix), copy(state[i].values)};
    }
  }
  stats_.steps = steps;
  stats_.factor_updates = factor_updates;
}

}  // namespace torchext
