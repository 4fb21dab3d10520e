// LocalGradientHook: a DDP communication hook that leaves gradients where they are, and tells a GradientListener when
// the last is there.
//
// Decentralized training averages parameters, never gradients: the hook returns each bucket as it is, at once, and
// tells the synchronizer when the last one is ready, so that asking for the next group overlaps with the optimizer's
// step. In C++, called by the reducer on autograd's thread: no Python, no GIL on the backward path.
//
// A reducer takes one hook in its life, a model may have several synchronizers one after the other (its group shrinks
// when a worker dies): GradientListener says which it is.
#pragma once

#include <memory>
#include <utility>

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "ddp/common/synchronizer.h"

namespace torchext {

// Whom the hook of one model tells. Set by the training thread, never during a backward pass.
struct GradientListener {
  std::shared_ptr<AveragingSynchronizer> synchronizer;
};

class LocalGradientHook : public c10d::CppCommHookInterface<std::shared_ptr<GradientListener>> {
 public:
  explicit LocalGradientHook(std::shared_ptr<GradientListener> target) : CppCommHookInterface(std::move(target)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    if (bucket.isLast() && state_->synchronizer) {
      state_->synchronizer->gradientsReady();
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(c10::IValue(bucket.getBuffer()));
    return future;
  }
};

// Registers the hook; once in a reducer's life.
inline std::shared_ptr<GradientListener> keepGradientsLocal(c10d::Reducer& reducer) {
  auto target = std::make_shared<GradientListener>();
  reducer.register_comm_hook(std::make_unique<LocalGradientHook>(target));
  return target;
}

}  // namespace torchext
