// KfacOptions is what K-FAC can be asked for. torchext/optim/preconditioner.py tells the user what each means.
#pragma once

#include <optional>
#include <string>

#include "core/base/enum_names.h"
#include "kfac/linalg/factor_inverse.h"

namespace torchext {

enum class FactorScaling { kKfc, kKfacPytorch };
// Of the products of directions: 16 bits where the processor is faster then, or all 24.
enum class ProductPrecision { kHigh, kHighest };

// As the user calls them.
inline constexpr core::EnumNames<InverseForm, 2> kMethodNames{
    {{InverseForm::kInverse, "inverse"}, {InverseForm::kEigen, "eigen"}}};
inline constexpr core::EnumNames<FactorScaling, 2> kScalingNames{
    {{FactorScaling::kKfc, "kfc"}, {FactorScaling::kKfacPytorch, "kfac-pytorch"}}};
inline constexpr core::EnumNames<ProductPrecision, 2> kPrecisionNames{
    {{ProductPrecision::kHigh, "high"}, {ProductPrecision::kHighest, "highest"}}};

struct KfacOptions {
  double damping = 0.003;                 // lambda, above 0
  double decay = 0.95;                    // of the running averages, [0, 1)
  bool martens_decay = false;             // min(1 - 1/k, decay) in the k-th update
  std::optional<double> kl_clip = 0.001;  // kappa, above 0; none: no clip
  int factor_update_steps = 1;            // 1 or more
  int inverse_update_steps = 10;          // a multiple of factor_update_steps
  InverseForm form = InverseForm::kInverse;
  FactorScaling scaling = FactorScaling::kKfc;
  std::string strategy = "spd";
  double worker_fraction = 0.5;          // of hybrid, (0, 1]
  double bucket_cap_mb = 25;             // of factors that travel together, MiB, above 0
  std::optional<bool> split_directions;  // none: where that costs less by the measured costs
  ProductPrecision precision = ProductPrecision::kHigh;
  std::optional<bool> gather_rows;  // for directions of Linear layers; none: where that costs less
  bool shared_memory = true;        // between ranks of one host, on the CPU
  bool queued = false;              // take an accelerator's path on the CPU too; for tests

  void validate() const;  // std::invalid_argument: name, value, allowed range
};

}  // namespace torchext
