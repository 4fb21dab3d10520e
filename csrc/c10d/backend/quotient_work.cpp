#include "c10d/backend/quotient_work.h"

#include <algorithm>
#include <utility>

#include <ATen/core/jit_type.h>
#include <ATen/ops/div.h>
#include <c10/core/InferenceMode.h>

namespace torchext {

QuotientWork::QuotientWork(c10::intrusive_ptr<c10d::Work> sum, std::vector<at::Tensor> tensors, int divisor)
    : CompatWork(-1, c10d::OpType::ALLREDUCE),
      sum_(std::move(sum)),
      tensors_(std::move(tensors)),
      quotient_(sum_->getFuture()->then(
          [tensors = tensors_, divisor](c10::ivalue::Future& added) -> c10::IValue {
            added.value();  // throws its error
            for (const at::Tensor& tensor : tensors) {
              // Made in inference mode, which this thread need not be in: such a tensor could not be written to.
              const c10::InferenceMode mode(tensor.is_inference());
              tensor.div_(divisor, "trunc");
            }
            return tensors;
          },
          c10::ListType::ofTensors())) {}

bool QuotientWork::wait(std::chrono::milliseconds timeout) {
  sum_->wait(timeout);
  quotient_->waitAndThrow();
  return true;
}

bool QuotientWork::wanted(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::AVG && !tensors.empty() &&
         std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
           return tensor.device().is_cpu() && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
         });
}

}  // namespace torchext
