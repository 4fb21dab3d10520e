// QuotientWork: a sum of whole numbers that is divided by the number of ranks once it is there.
//
// Gloo averages floating point only. What Gloo's users do about it is sum, and divide towards zero.
#pragma once

#include <vector>

#include "c10d/backend/torch_compat.h"

namespace torchext {

class QuotientWork final : public CompatWork {
 public:
  // sum: under way, into `tensors`; has a future.
  QuotientWork(c10::intrusive_ptr<c10d::Work> sum, std::vector<at::Tensor> tensors, int divisor);
  bool isCompleted() override { return quotient_->completed(); }
  bool isSuccess() const override { return quotient_->completed() && !quotient_->hasError(); }
  std::exception_ptr exception() const override { return quotient_->exception_ptr(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override { sum_->abort(); }
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return quotient_; }

  // All of them whole numbers.
  static bool wanted(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

 protected:
  std::chrono::milliseconds workTimeout() const override { return kNoTimeout; }

 private:
  c10::intrusive_ptr<c10d::Work> sum_;
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> quotient_;
};

}  // namespace torchext
