// LocalGradientHook: a DDP communication hook that leaves gradients where they are.
//
// Decentralized training averages parameters, never gradients: the hook returns each bucket as it is, at once, and
// tells the synchronizer when the last one is ready, so that asking for the next group overlaps with the optimizer's
// step. In C++, called by the reducer on autograd's thread: no Python, no GIL on the backward path.
#pragma once

#include <memory>
#include <utility>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "ddp/synchronizer.h"

namespace torchext {

class LocalGradientHook : public c10d::CppCommHookInterface<std::shared_ptr<AveragingSynchronizer>> {
 public:
  explicit LocalGradientHook(std::shared_ptr<AveragingSynchronizer> synchronizer)
      : CppCommHookInterface(std::move(synchronizer)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    if (bucket.isLast()) {
      state_->gradientsReady();
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(c10::IValue(bucket.getBuffer()));
    return future;
  }
};

}  // namespace torchext
