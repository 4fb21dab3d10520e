#include "kfac/base/kfac_options.h"

#include <cmath>

#include "core/base/check.h"
#include "core/kfac/kfac_plan.h"

namespace torchext {

void KfacOptions::validate() const {
  using core::throwInvalid;
  if (!(damping > 0) || !std::isfinite(damping)) {
    throwInvalid("damping", damping, "above 0, finite");
  }
  if (!(decay >= 0 && decay < 1)) {
    throwInvalid("factor_decay", decay, "[0, 1)");
  }
  if (kl_clip && (!(*kl_clip > 0) || !std::isfinite(*kl_clip))) {
    throwInvalid("kl_clip", *kl_clip, "above 0, finite; None for no clip");
  }
  if (factor_update_steps < 1) {
    throwInvalid("factor_update_steps", factor_update_steps, "1 or more");
  }
  if (inverse_update_steps < 1 || inverse_update_steps % factor_update_steps != 0) {
    throwInvalid("inverse_update_steps", inverse_update_steps,
                 core::concat("a multiple of factor_update_steps = ", factor_update_steps));
  }
  if (!(worker_fraction > 0 && worker_fraction <= 1)) {
    throwInvalid("worker_fraction", worker_fraction, "above 0, up to 1");
  }
  if (!(bucket_cap_mb > 0) || !std::isfinite(bucket_cap_mb)) {
    throwInvalid("bucket_cap_mb", bucket_cap_mb, "above 0, finite");
  }
  const core::KfacStrategy parsed = core::parseKfacStrategy(strategy);
  if (gather_rows == true) {
    if (form != InverseForm::kInverse) {
      throwInvalid("gather_rows", "True", "with method=\"inverse\" only; leave it out");
    }
    if (parsed == core::KfacStrategy::kMemOpt || parsed == core::KfacStrategy::kDp ||
        parsed == core::KfacStrategy::kDkfac) {
      throwInvalid("gather_rows", "True",
                   core::concat("where all ranks make the same directions, and strategy=\"", strategy,
                                "\" is not one for it; leave it out"));
    }
    if (inverse_update_steps == 1) {
      throwInvalid("gather_rows", "True",
                   "with inverse_update_steps above 1, for steps that make inverses do without rows; leave it out");
    }
  }
}

}  // namespace torchext
