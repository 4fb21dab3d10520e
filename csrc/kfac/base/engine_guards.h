// EngineGuards make the engine's arithmetic its own: without a graph, and in the types it chooses, whatever the caller
// has switched on. A step under torch.autocast would else multiply factors in bfloat16, one after
// set_float32_matmul_precision("high") in TF32.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

class EngineGuards {
 private:
  at::NoGradGuard no_grad_;
  at::NoTF32Guard no_tf32_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

}  // namespace torchext
