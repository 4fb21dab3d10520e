// CUDA operators of the adaptive embedding bag's backward pass: gradients of the pool, utility, and the fused updates.
#include <cmath>
#include <limits>

#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "kernels/bag_dispatch.h"
#include "kernels/cuda/bag_elements.h"
#include "kernels/cuda/bag_tensors.h"

namespace torchext::kernels {

namespace {

template <class T>
T* dataOf(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// What a backward pass needs to know before it touches anything.
class CudaBackward {
 public:
  CudaBackward(const char* op, const at::Tensor& gradient, const at::Tensor& argmax, const at::Tensor& pool,
               const at::Tensor& index, const BagLayout& layout, const OptionalTensor& weights, std::int64_t rows,
               std::int64_t chunks)
      : op_(op),
        pool_(pool),
        rows_(rows),
        chunks_(chunks),
        table_([&] {
          checkWeights(op, weights, layout, pool);
          const cuda::TableView table = tableView(op, pool, index, rows, chunks, false);
          checkDevice(op, "gradient", gradient, pool.device());
          checkDevice(op, "argmax", argmax, pool.device());
          return table;
        }()),
        scope_(pool),
        batch_(op, layout, pool, rows) {
    const std::int64_t dim = chunks * pool.size(1);
    const bool fits = gradient.dim() == 2 && gradient.size(0) == batch_.view().bags && gradient.size(1) == dim;
    TORCH_CHECK_VALUE(fits, op, ": gradient has shape ", gradient.sizes(), ", the output ", batch_.view().bags, " x ",
                      dim);
    TORCH_CHECK_TYPE(gradient.scalar_type() == pool.scalar_type(), op, ": gradient is ", gradient.scalar_type(),
                     ", the table ", pool.scalar_type());
    const bool max = batch_.view().mode == cpu::BagMode::kMax;
    TORCH_CHECK_VALUE(!max || argmax.numel() == gradient.numel(), op, ": argmax has ", argmax.numel(),
                      " elements, gradient ", gradient.numel());
    TORCH_CHECK_TYPE(!max || argmax.scalar_type() == at::kInt, op, ": argmax is ", argmax.scalar_type(),
                     "; it must be Int");
    gradient_ = gradient.contiguous();
    argmax_ = argmax.contiguous();
    weights_ = weights.has_value() ? OptionalTensor(weights->contiguous()) : std::nullopt;
  }

  // Lets the pass collect utility as well. Moves the clock one step on.
  void observe(const at::Tensor& utility, const at::Tensor& sketch, const at::Tensor& clock, double gamma) {
    checkClock(op_, clock, gamma);
    const core::ChunkUtility checked = utilityOf(op_, utility, sketch, pool_.device(), pool_.size(0), rows_, chunks_);
    const bool floats = checked.layout() == core::ChunkUtility::Layout::kFloats;
    const bool sketched = checked.layout() == core::ChunkUtility::Layout::kSketch;
    const bool codes = sketched || checked.layout() == core::ChunkUtility::Layout::kBytes;
    utility_.floats = floats ? utility.mutable_data_ptr<float>() : nullptr;
    utility_.codes = codes ? utility.mutable_data_ptr<std::uint8_t>() : nullptr;
    if (sketched) {
      checkDevice(op_, "sketch", sketch, pool_.device());
      const std::int64_t items = batch_.view().positions * chunks_;
      TORCH_CHECK_VALUE(items < std::numeric_limits<std::int32_t>::max(), op_, ": ", batch_.view().positions,
                        " ids of ", chunks_, " chunks in one batch; with layout='sketch' at most 2^31 - 2 chunks");
      utility_.cell_keys = sketch.mutable_data_ptr<std::int32_t>();
      utility_.cell_count = static_cast<std::size_t>(sketch.numel());
      utility_.slots = pool_.size(0);
    }
    auto* now = clock.mutable_data_ptr<double>();
    now[0] += 1;
    now[1] /= gamma;
    if (checked.mustRenormalise(now[1])) {
      if (utility_.kept()) {
        DeviceScope::check(cuda::launchRenormalise(utility_, utility.numel(), &now[1], scope_.stream()));
      } else {
        now[1] = 1;
      }
    }
    utility_.step = static_cast<std::uint64_t>(now[0]);
    utility_.factor = static_cast<float>(now[1]);
  }
  double step() const { return static_cast<double>(utility_.step); }

  // Groups the positions by row; once, after observe() and before run().
  const cuda::Workspace& group() {
    if (!runs_.has_value()) {
      cuda::WorkspaceSizes sizes;
      sizes.bags = batch_.view().mode == cpu::BagMode::kMean ? batch_.view().bags : 0;
      sizes.dim = chunks_ * pool_.size(1);
      sizes.sketched = utility_.sketched() ? batch_.view().positions * chunks_ : 0;
      runs_.emplace(scope_, batch_.view(), pool_, sizes, static_cast<std::int64_t>(utility_.cell_count));
    }
    return runs_->space();
  }

  template <class T>
  void run(const cuda::UpdateView<T>& update, bool scale_by_frequency) {
    using M = cuda::MathOf<T>;
    const cuda::Workspace& space = group();
    setAligned(table_, {gradient_.const_data_ptr(), update.pool, update.values, space.partial,
                        // One number a slot is read singly.
                        update.kind == cuda::Update::kAdam ? update.first : nullptr, update.second});
    const cuda::BackwardView<T> view{
        batch_.view().mode,
        table_,
        space.runs(batch_.view()),
        static_cast<const T*>(gradient_.const_data_ptr()),
        weights_.has_value() ? static_cast<const T*>(weights_->const_data_ptr()) : nullptr,
        batch_.view().mode == cpu::BagMode::kMax ? argmax_.const_data_ptr<std::int32_t>() : nullptr,
        static_cast<const M*>(space.inverse),
        static_cast<M*>(space.partial),
        scale_by_frequency,
        utility_,
        space.grown,
        update};
    DeviceScope::check(cuda::launchBackward<T>(batch_.view(), view, space, scope_.stream()));
  }

  // Of each (sorted position, chunk) its place in a sparse gradient, counted from 1; and how many there are, for which
  // it waits.
  std::pair<at::Tensor, std::int64_t> places() {
    const cuda::Workspace& space = group();
    at::Tensor marks = at::empty({batch_.view().positions * chunks_}, pool_.options().dtype(at::kInt));
    DeviceScope::check(
        cuda::launchMarks(space.runs(batch_.view()), table_, marks.mutable_data_ptr<std::int32_t>(), scope_.stream()));
    at::Tensor places = at::cumsum(marks, 0, at::kInt);
    return {places, places.numel() == 0 ? 0 : places[-1].item().toLong()};
  }

 private:
  const char* op_;
  const at::Tensor& pool_;
  std::int64_t rows_;
  std::int64_t chunks_;
  cuda::TableView table_;
  DeviceScope scope_;
  DeviceBatch batch_;
  at::Tensor gradient_;
  at::Tensor argmax_;
  OptionalTensor weights_;
  std::optional<DeviceRuns> runs_;
  cuda::UtilityView utility_;
};

at::Tensor denseGradientCuda(const at::Tensor& gradient, const at::Tensor& argmax, const at::Tensor& pool,
                             const at::Tensor& index, const at::Tensor& ids, const OptionalTensor& offsets,
                             std::int64_t bag_size, bool include_last, const OptionalTensor& weights, std::int64_t rows,
                             std::int64_t chunks, std::int64_t mode, std::int64_t padding_idx,
                             bool scale_by_frequency) {
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  CudaBackward pass("adaptive_bag_dense_gradient", gradient, argmax, pool, index, layout, weights, rows, chunks);
  at::Tensor result = at::zeros_like(pool);
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    using T = cuda::ElementOf<scalar_t>;
    cuda::UpdateView<T> update;
    update.kind = cuda::Update::kDense;
    update.values = dataOf<T>(result);
    pass.run(update, scale_by_frequency);
  });
  return result;
}

void observeCuda(const at::Tensor& gradient, const at::Tensor& argmax, const at::Tensor& pool, const at::Tensor& index,
                 const at::Tensor& utility, const at::Tensor& sketch, const at::Tensor& clock, const at::Tensor& ids,
                 const OptionalTensor& offsets, std::int64_t bag_size, bool include_last, const OptionalTensor& weights,
                 std::int64_t rows, std::int64_t chunks, std::int64_t mode, std::int64_t padding_idx,
                 bool scale_by_frequency, double gamma) {
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  CudaBackward pass("adaptive_bag_observe_", gradient, argmax, pool, index, layout, weights, rows, chunks);
  pass.observe(utility, sketch, clock, gamma);
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(),
                         [&] { pass.run(cuda::UpdateView<cuda::ElementOf<scalar_t>>{}, scale_by_frequency); });
}

std::tuple<at::Tensor, at::Tensor> sparseGradientCuda(const at::Tensor& gradient, const at::Tensor& argmax,
                                                      const at::Tensor& pool, const at::Tensor& index,
                                                      const at::Tensor& utility, const at::Tensor& sketch,
                                                      const at::Tensor& clock, const at::Tensor& ids,
                                                      const OptionalTensor& offsets, std::int64_t bag_size,
                                                      bool include_last, const OptionalTensor& weights,
                                                      std::int64_t rows, std::int64_t chunks, std::int64_t mode,
                                                      std::int64_t padding_idx, bool scale_by_frequency, double gamma) {
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  CudaBackward pass("adaptive_bag_sparse_gradient", gradient, argmax, pool, index, layout, weights, rows, chunks);
  pass.observe(utility, sketch, clock, gamma);
  const auto [places, count] = pass.places();
  at::Tensor slots = at::empty({count}, pool.options().dtype(at::kLong));
  at::Tensor values = at::empty({count, pool.size(1)}, pool.options());
  const auto* place = places.const_data_ptr<std::int32_t>();
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    using T = cuda::ElementOf<scalar_t>;
    cuda::UpdateView<T> update;
    update.kind = cuda::Update::kSparse;
    update.values = dataOf<T>(values);
    update.slots = slots.mutable_data_ptr<std::int64_t>();
    update.places = place;
    pass.run(update, scale_by_frequency);
  });
  return {slots, values};
}

// State of an optimizer is float32, beside a float64 pool float64.
template <class M>
M* stateOf(const at::Tensor& state, const char* name, at::Device device, c10::IntArrayRef shape) {
  constexpr const char* kOp = "adaptive_bag_update_";
  TORCH_CHECK_TYPE(state.scalar_type() == c10::CppTypeToScalarType<M>::value, kOp, ": ", name, " is ",
                   state.scalar_type(), "; it must be ", c10::CppTypeToScalarType<M>::value);
  TORCH_CHECK_VALUE(state.sizes() == shape && state.is_contiguous(), kOp, ": ", name, " has shape ", state.sizes(),
                    "; it must be ", shape, ", contiguous");
  checkDevice(kOp, name, state, device);
  return state.mutable_data_ptr<M>();
}

void updateCuda(const at::Tensor& gradient, const at::Tensor& argmax, const at::Tensor& pool, at::TensorList state,
                const at::Tensor& index, const at::Tensor& utility, const at::Tensor& sketch, const at::Tensor& clock,
                const at::Tensor& lr, const at::Tensor& ids, const OptionalTensor& offsets, std::int64_t bag_size,
                bool include_last, const OptionalTensor& weights, std::int64_t rows, std::int64_t chunks,
                std::int64_t mode, std::int64_t padding_idx, bool scale_by_frequency, double gamma,
                c10::string_view optimizer, double beta1, double beta2, double eps) {
  constexpr const char* kOp = "adaptive_bag_update_";
  const BagLayout layout{ids, offsets, bag_size, include_last, mode, padding_idx};
  CudaBackward pass(kOp, gradient, argmax, pool, index, layout, weights, rows, chunks);
  const std::size_t states = optimizer == "sgd" ? 0 : optimizer == "adagrad" ? 1 : 2;
  TORCH_CHECK_VALUE(states < 2 || optimizer == "adam", kOp, ": optimizer is '", optimizer,
                    "'; allowed are 'sgd', 'adagrad', 'adam'");
  TORCH_CHECK_VALUE(state.size() == states, kOp, ": ", optimizer, " has ", states, " tensors of state, got ",
                    state.size());
  TORCH_CHECK_VALUE(lr.numel() == 1 && lr.device().is_cpu(), kOp, ": lr must be one number on cpu, got ", lr.sizes(),
                    " on ", lr.device());
  double rate = lr.item().toDouble();
  TORCHEXT_DISPATCH_POOL(pool.scalar_type(), [&] {
    using T = cuda::ElementOf<scalar_t>;
    using M = cuda::MathOf<T>;
    cuda::UpdateView<T> update;
    update.kind = states == 0 ? cuda::Update::kSgd : states == 1 ? cuda::Update::kAdagrad : cuda::Update::kAdam;
    update.pool = dataOf<T>(pool);
    if (states == 1) {
      update.first = stateOf<M>(state[0], "state[0]", pool.device(), {pool.size(0)});
    } else if (states == 2) {
      update.first = stateOf<M>(state[0], "state[0]", pool.device(), pool.sizes());
      update.second = stateOf<M>(state[1], "state[1]", pool.device(), pool.sizes());
    }
    pass.observe(utility, sketch, clock, gamma);
    if (states == 2) {
      rate *= std::sqrt(1 - std::pow(beta2, pass.step())) / (1 - std::pow(beta1, pass.step()));
    }
    update.rate = static_cast<M>(rate);
    update.beta1 = static_cast<M>(beta1);
    update.beta2 = static_cast<M>(beta2);
    update.eps = static_cast<M>(eps);
    pass.run(update, scale_by_frequency);
  });
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY_IMPL(torchext, TORCHEXT_DEVICE_KEY, m) {
  m.impl("adaptive_bag_dense_gradient", torchext::kernels::denseGradientCuda);
  m.impl("adaptive_bag_observe_", torchext::kernels::observeCuda);
  m.impl("adaptive_bag_sparse_gradient", torchext::kernels::sparseGradientCuda);
  m.impl("adaptive_bag_update_", torchext::kernels::updateCuda);
}
