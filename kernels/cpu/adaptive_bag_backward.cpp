// CPU kernels of the adaptive embedding bag's backward pass: gradients of the pool, utility, and the fused updates.
#include <cmath>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "kernels/adaptive_bag.h"
#include "kernels/bag_dispatch.h"
#include "kernels/cpu/bag_backward.h"
#include "kernels/cpu/bag_sinks.h"

namespace torchext::kernels {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// What a backward pass needs to know before it touches anything.
class Backward {
 public:
  Backward(const char* op, const at::Tensor& gradient, const at::Tensor& argmax, const at::Tensor& pool,
           const at::Tensor& index, const BagLayout& layout, const OptionalTensor& weights, std::int64_t rows,
           std::int64_t chunks)
      : op_(op),
        pool_(pool),
        rows_(rows),
        chunks_(chunks),
        argmax_(argmax.contiguous()),
        table_([&] {
          checkTable(op, pool, index, rows, chunks);
          checkWeights(op, weights, layout, pool);
          return indexOf(op, index, at::kCPU, rows, chunks);
        }()),
        batch_(batchOf(op, layout, rows)) {
    const std::int64_t dim = chunks * pool.size(1);
    const bool fits = gradient.dim() == 2 && gradient.size(0) == batch_.bags() && gradient.size(1) == dim;
    TORCH_CHECK_VALUE(fits, op, ": gradient has shape ", gradient.sizes(), ", the output ", batch_.bags(), " x ", dim);
    TORCH_CHECK_TYPE(gradient.scalar_type() == pool.scalar_type(), op, ": gradient is ", gradient.scalar_type(),
                     ", the table ", pool.scalar_type());
    TORCH_CHECK_VALUE(batch_.mode != cpu::BagMode::kMax || argmax.numel() == gradient.numel(), op, ": argmax has ",
                      argmax.numel(), " elements, gradient ", gradient.numel());
    gradient_ = gradient.contiguous();
    weights_ = weights.has_value() ? OptionalTensor(weights->contiguous()) : std::nullopt;
  }

  const core::ChunkIndex& table() const { return table_; }
  const cpu::GroupedIds& grouped() {
    if (grouped_.starts.empty()) {
      grouped_ = cpu::groupIds(batch_, rows_);
    }
    return grouped_;
  }

  // Lets the pass collect utility as well. Moves the clock one step on.
  void observe(const at::Tensor& utility, const at::Tensor& sketch, const at::Tensor& clock, double gamma) {
    checkClock(op_, clock, gamma);
    utility_ = utilityOf(op_, utility, sketch, at::kCPU, pool_.size(0), rows_, chunks_);
    auto* now = clock.mutable_data_ptr<double>();
    now[0] += 1;
    now[1] /= gamma;
    if (utility_.mustRenormalise(now[1])) {
      now[1] = utility_.renormalise(now[1]);
    }
    step_ = static_cast<std::uint64_t>(now[0]);
    factor_ = static_cast<float>(now[1]);
  }
  double step() const { return static_cast<double>(step_); }

  template <class T, class Sink>
  void run(const Sink& sink, bool scale_by_frequency) {
    const auto& groups = grouped();
    const auto bag_of = batch_.bagOf();
    const auto inverse = batch_.mode == cpu::BagMode::kMean ? batch_.inverseCounts() : std::vector<double>();
    const bool sketch = utility_.layout() == core::ChunkUtility::Layout::kSketch;
    const bool observed = utility_.layout() != core::ChunkUtility::Layout::kNone;
    std::vector<float> amounts(sketch ? groups.groups() * static_cast<std::size_t>(chunks_) : 0);
    const cpu::BackwardArgs<T> args{
        batch_,
        groups,
        table_,
        gradient_.const_data_ptr<T>(),
        weights_.has_value() ? weights_->const_data_ptr<T>() : nullptr,
        batch_.mode == cpu::BagMode::kMax ? argmax_.const_data_ptr<std::int32_t>() : nullptr,
        bag_of.data(),
        inverse.data(),
        scale_by_frequency,
        observed ? &utility_ : nullptr,
        factor_,
        step_,
        sketch ? amounts.data() : nullptr};
    cpu::withWidth<T>(static_cast<std::size_t>(pool_.size(1)), [&](auto width) {
      const auto count = static_cast<std::int64_t>(groups.groups());
      at::parallel_for(0, count, kGrain, [&](std::int64_t begin, std::int64_t end) {
        const Sink own = sink;  // a sink may count
        cpu::onBestIsa<cpu::BackwardKernel>(args, width, own, static_cast<std::size_t>(begin),
                                            static_cast<std::size_t>(end));
      });
    });
    if (sketch) {
      addToSketch(amounts);
    }
  }

 private:
  // Chunks share the sketch's cells: one thread, rows in rising order.
  void addToSketch(const std::vector<float>& amounts) {
    std::vector<std::int32_t> slots(static_cast<std::size_t>(chunks_));
    for (std::size_t group = 0; group < grouped_.groups(); ++group) {
      const std::int64_t row = grouped_.idOf(group);
      table_.findRow(row, slots.data());
      for (std::int64_t c = 0; c < chunks_; ++c) {
        const auto at = static_cast<std::size_t>(c);
        utility_.add(row * chunks_ + c, slots[at], amounts[group * slots.size() + at], step_);
      }
    }
  }

  const char* op_;
  const at::Tensor& pool_;
  std::int64_t rows_;
  std::int64_t chunks_;
  at::Tensor argmax_;
  core::ChunkIndex table_;
  cpu::BagBatch batch_;
  cpu::GroupedIds grouped_;
  at::Tensor gradient_;
  OptionalTensor weights_;
  core::ChunkUtility utility_ = core::ChunkUtility::none();
  float factor_ = 1;
  std::uint64_t step_ = 0;
};

at::Tensor denseGradient(const at::Tensor& gradient, const at::Tensor& argmax, const at::Tensor& pool,
                         const at::Tensor& index, const at::Tensor& ids, const OptionalTensor& offsets,
                         std::int64_t bag_size, bool include_last, const OptionalTensor& weights, std::int64_t rows,
                         std::int64_t chunks, std::int64_t mode, std::int64_t padding_idx, bool scale_by_frequency) {
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  Backward pass("adaptive_bag_dense_gradient", gradient, argmax, pool, index, layout, weights, rows, chunks);
  at::Tensor result = at::zeros_like(pool);
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    pass.run<scalar_t>(cpu::DenseSink<scalar_t>{result.mutable_data_ptr<scalar_t>()}, scale_by_frequency);
  });
  return result;
}

void observe(const at::Tensor& gradient, const at::Tensor& argmax, const at::Tensor& pool, const at::Tensor& index,
             const at::Tensor& utility, const at::Tensor& sketch, const at::Tensor& clock, const at::Tensor& ids,
             const OptionalTensor& offsets, std::int64_t bag_size, bool include_last, const OptionalTensor& weights,
             std::int64_t rows, std::int64_t chunks, std::int64_t mode, std::int64_t padding_idx,
             bool scale_by_frequency, double gamma) {
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  Backward pass("adaptive_bag_observe_", gradient, argmax, pool, index, layout, weights, rows, chunks);
  pass.observe(utility, sketch, clock, gamma);
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] { pass.run<scalar_t>(cpu::NoSink<scalar_t>{}, scale_by_frequency); });
}

std::tuple<at::Tensor, at::Tensor> sparseGradient(const at::Tensor& gradient, const at::Tensor& argmax,
                                                  const at::Tensor& pool, const at::Tensor& index,
                                                  const at::Tensor& utility, const at::Tensor& sketch,
                                                  const at::Tensor& clock, const at::Tensor& ids,
                                                  const OptionalTensor& offsets, std::int64_t bag_size,
                                                  bool include_last, const OptionalTensor& weights, std::int64_t rows,
                                                  std::int64_t chunks, std::int64_t mode, std::int64_t padding_idx,
                                                  bool scale_by_frequency, double gamma) {
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  Backward pass("adaptive_bag_sparse_gradient", gradient, argmax, pool, index, layout, weights, rows, chunks);
  pass.observe(utility, sketch, clock, gamma);
  const auto& grouped = pass.grouped();
  std::vector<std::int64_t> starts(grouped.groups() + 1);
  std::vector<std::int32_t> slots_of_row(static_cast<std::size_t>(chunks));
  for (std::size_t group = 0; group < grouped.groups(); ++group) {
    starts[group + 1] = starts[group] + pass.table().findRow(grouped.idOf(group), slots_of_row.data());
  }
  at::Tensor slots = at::empty({starts.back()}, pool.options().dtype(at::kLong));
  at::Tensor values = at::empty({starts.back(), pool.size(1)}, pool.options());
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    pass.run<scalar_t>(cpu::SparseSink<scalar_t>{starts.data(), slots.mutable_data_ptr<std::int64_t>(),
                                                 values.mutable_data_ptr<scalar_t>()},
                       scale_by_frequency);
  });
  return {slots, values};
}

// State of an optimizer is float32, beside a float64 pool float64.
template <class M>
M* stateOf(const at::Tensor& state, const char* name, c10::IntArrayRef shape) {
  constexpr const char* kOp = "adaptive_bag_update_";
  TORCH_CHECK_TYPE(state.scalar_type() == c10::CppTypeToScalarType<M>::value, kOp, ": ", name, " is ",
                   state.scalar_type(), "; it must be ", c10::CppTypeToScalarType<M>::value);
  TORCH_CHECK_VALUE(state.sizes() == shape && state.is_contiguous(), kOp, ": ", name, " has shape ", state.sizes(),
                    "; it must be ", shape, ", contiguous");
  return state.mutable_data_ptr<M>();
}

void update(const at::Tensor& gradient, const at::Tensor& argmax, const at::Tensor& pool, at::TensorList state,
            const at::Tensor& index, const at::Tensor& utility, const at::Tensor& sketch, const at::Tensor& clock,
            const at::Tensor& lr, const at::Tensor& ids, const OptionalTensor& offsets, std::int64_t bag_size,
            bool include_last, const OptionalTensor& weights, std::int64_t rows, std::int64_t chunks, std::int64_t mode,
            std::int64_t padding_idx, bool scale_by_frequency, double gamma, c10::string_view optimizer, double beta1,
            double beta2, double eps) {
  constexpr const char* kOp = "adaptive_bag_update_";
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  Backward pass(kOp, gradient, argmax, pool, index, layout, weights, rows, chunks);
  const std::size_t states = optimizer == "sgd" ? 0 : optimizer == "adagrad" ? 1 : 2;
  TORCH_CHECK_VALUE(states < 2 || optimizer == "adam", kOp, ": optimizer is '", optimizer,
                    "'; allowed are 'sgd', 'adagrad', 'adam'");
  TORCH_CHECK_VALUE(state.size() == states, kOp, ": ", optimizer, " has ", states, " tensors of state, got ",
                    state.size());
  TORCH_CHECK_VALUE(lr.numel() == 1 && lr.device().is_cpu(), kOp, ": lr must be one number on cpu, got ", lr.sizes());
  const double rate = lr.item().toDouble();
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    using M = cpu::MathOf<scalar_t>;
    auto* values = pool.mutable_data_ptr<scalar_t>();
    if (optimizer == "sgd") {
      pass.observe(utility, sketch, clock, gamma);
      pass.run<scalar_t>(cpu::SgdSink<scalar_t>{values, static_cast<M>(rate)}, scale_by_frequency);
    } else if (optimizer == "adagrad") {
      M* sums = stateOf<M>(state[0], "state[0]", {pool.size(0)});
      pass.observe(utility, sketch, clock, gamma);
      pass.run<scalar_t>(cpu::AdagradSink<scalar_t>{values, sums, static_cast<M>(rate), static_cast<M>(eps)},
                         scale_by_frequency);
    } else {
      M* first = stateOf<M>(state[0], "state[0]", pool.sizes());
      M* second = stateOf<M>(state[1], "state[1]", pool.sizes());
      pass.observe(utility, sketch, clock, gamma);
      const double corrected = rate * std::sqrt(1 - std::pow(beta2, pass.step())) / (1 - std::pow(beta1, pass.step()));
      pass.run<scalar_t>(cpu::AdamSink<scalar_t>{values, first, second, static_cast<M>(corrected),
                                                 static_cast<M>(beta1), static_cast<M>(beta2), static_cast<M>(eps)},
                         scale_by_frequency);
    }
  });
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, CPU, m) {
  m.impl("adaptive_bag_dense_gradient", torchext::kernels::denseGradient);
  m.impl("adaptive_bag_observe_", torchext::kernels::observe);
  m.impl("adaptive_bag_sparse_gradient", torchext::kernels::sparseGradient);
  m.impl("adaptive_bag_update_", torchext::kernels::update);
}
