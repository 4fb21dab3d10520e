// The schemas of torchext's operators, what all devices check alike, and their answer to autograd.
//
// The module this becomes (torchext._kernels) exports nothing to Python: importing it runs the registrations. The fake
// kernels are Python (torchext/ops.py), because sizes may be symbols there.
#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "kernels/multi_tensor.h"
#include "kernels/version.h"

namespace torchext::kernels {

namespace {

bool isSupported(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

// The bytes [begin, end) of a dense tensor, and its place in the argument list (-1: flat).
struct Extent {
  const char* begin;
  const char* end;
  std::ptrdiff_t index;
};

Extent extentOf(const at::Tensor& tensor, std::ptrdiff_t index) {
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + tensor.nbytes(), index};
}

std::string nameOf(const Extent& extent) { return extent.index < 0 ? "flat" : c10::str("tensors[", extent.index, "]"); }

void checkOverlap(const char* op, at::TensorList tensors, const at::Tensor& flat, Direction direction) {
  const Extent buffer = extentOf(flat, -1);
  std::vector<Extent> extents;
  extents.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Extent extent = extentOf(tensors[i], static_cast<std::ptrdiff_t>(i));
    if (extent.begin == extent.end) {
      continue;
    }
    TORCH_CHECK_VALUE(extent.end <= buffer.begin || buffer.end <= extent.begin, op, ": ", nameOf(extent),
                      " shares memory with flat; the two must not overlap");
    extents.push_back(extent);
  }
  if (direction == Direction::kIntoFlat) {
    return;
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < extents.size(); ++i) {
    const Extent& before = extents[i - 1];
    TORCH_CHECK_VALUE(before.end <= extents[i].begin, op, ": ", nameOf(before), " and ", nameOf(extents[i]),
                      " share memory, so the result would depend on the order of writing; pass each tensor once");
  }
}

}  // namespace

std::vector<std::int64_t> checkedOffsets(const char* op, at::TensorList tensors, const at::Tensor& flat,
                                         c10::DeviceType device, Direction direction) {
  TORCH_CHECK_VALUE(flat.dim() == 1, op, ": flat must be 1-D, got shape ", flat.sizes());
  TORCH_CHECK_VALUE(flat.is_contiguous(), op, ": flat must be contiguous, got stride ", flat.stride(0));
  TORCH_CHECK_VALUE(flat.device().type() == device, op, ": flat is on ", flat.device(), ", another argument on ",
                    c10::DeviceTypeName(device, true), "; all must be on one device");
  TORCH_CHECK_TYPE(isSupported(flat.scalar_type()), op, ": flat is ", flat.scalar_type(),
                   "; supported are Float, Double, Half, BFloat16");
  std::vector<std::int64_t> offsets{0};
  offsets.reserve(tensors.size() + 1);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    TORCH_CHECK_VALUE(tensor.device() == flat.device(), op, ": tensors[", i, "] is on ", tensor.device(), ", flat on ",
                      flat.device(), "; all must be on one device");
    TORCH_CHECK_TYPE(tensor.scalar_type() == flat.scalar_type(), op, ": tensors[", i, "] is ", tensor.scalar_type(),
                     ", flat is ", flat.scalar_type(), "; they must be the same");
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(), op, ": tensors[", i,
                      "] of shape ", tensor.sizes(),
                      " is not dense in memory (a slice or an expanded tensor?); pass a contiguous copy");
    offsets.push_back(offsets.back() + tensor.numel());
  }
  TORCH_CHECK_VALUE(offsets.back() == flat.numel(), op, ": the tensors hold ", offsets.back(), " elements, flat holds ",
                    flat.numel());
  checkOverlap(op, tensors, flat, direction);
  return offsets;
}

namespace {

constexpr const char* kNoGradHint =
    " requires grad, and this operator has no derivative; call it under torch.no_grad() (parameters too)";

void checkNoGrad(const char* op, at::TensorList tensors, const at::Tensor& flat) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  TORCH_CHECK(!flat.requires_grad(), op, ": flat", kNoGradHint);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(!tensors[i].requires_grad(), op, ": tensors[", i, "]", kNoGradHint);
  }
}

void flattenAutograd(at::TensorList tensors, const at::Tensor& flat) {
  checkNoGrad("multi_tensor_flatten", tensors, flat);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchext::multi_tensor_flatten", "")
                             .typed<void(at::TensorList, const at::Tensor&)>();
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(tensors, flat);
  }
  bumpVersion(flat);
}

void averageAutograd(at::TensorList tensors, const at::Tensor& flat, double scale) {
  checkNoGrad("multi_tensor_average_", tensors, flat);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchext::multi_tensor_average_", "")
                             .typed<void(at::TensorList, const at::Tensor&, double)>();
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(tensors, flat, scale);
  }
  for (const at::Tensor& tensor : tensors) {
    bumpVersion(tensor);
  }
}

}  // namespace

}  // namespace torchext::kernels

TORCH_LIBRARY(torchext, m) {
  m.set_python_module("torchext.ops");  // named in the error when the fake kernels have not been imported
  m.def("multi_tensor_flatten(Tensor[] tensors, Tensor(a!) flat) -> ()");
  m.def("multi_tensor_average_(Tensor(a!)[] tensors, Tensor flat, float scale) -> ()");
}

TORCH_LIBRARY_IMPL(torchext, Autograd, m) {
  m.impl("multi_tensor_flatten", torchext::kernels::flattenAutograd);
  m.impl("multi_tensor_average_", torchext::kernels::averageAutograd);
}

// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming): the name is what Python looks for.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__kernels() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "_kernels",
                                   "Registers torch.ops.torchext.*; has no names of its own.",
                                   -1,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  return PyModule_Create(&definition);
}
