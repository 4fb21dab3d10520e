#include "ddp/common/buffer_mean.h"

namespace torchext {
namespace {

constexpr std::int64_t kLowDigits = (std::int64_t{1} << 27U) - 1;  // of a float64's 53
constexpr double kRoom = 0x1p32;

at::Tensor same(const at::Tensor& left, const at::Tensor& right) {
  return left.eq(right).logical_or_(left.isnan().logical_and_(right.isnan()));
}

}  // namespace

at::Tensor toSum(const at::Tensor& values) {
  if (values.scalar_type() != at::kDouble) {
    return values.to(at::kDouble);
  }
  const at::Tensor finite = values.isfinite();
  const at::Tensor high = at::where(finite, values.view(at::kLong).bitwise_and(~kLowDigits).view(at::kDouble), values);
  const at::Tensor low = at::where(finite, values - high, at::zeros_like(values));
  return at::cat({high, low}).mul_(1.0 / kRoom);
}

void toMean(const at::Tensor& sum, std::int64_t count, const at::Tensor& mean) {
  const at::Tensor parts = sum.div(count);
  if (mean.scalar_type() != at::kDouble) {
    mean.copy_(parts);
  } else {
    mean.copy_(parts.narrow(0, 0, mean.numel())).add_(parts.narrow(0, mean.numel(), mean.numel())).mul_(kRoom);
  }
}

at::Tensor change(const at::Tensor& after, const at::Tensor& before) {
  return (after - before).masked_fill_(same(after, before), 0);
}

at::Tensor carry(const at::Tensor& mean, const at::Tensor& now, const at::Tensor& before) {
  const at::Tensor moved = mean + (now - before);
  return at::where(same(now, before), mean, at::where(moved.isfinite(), moved, now));
}

at::Tensor nonnegative(const at::Tensor& mean, const at::Tensor& before) {
  return mean.ge(0).logical_and_(before.ge(0));
}

at::Tensor keepSign(const at::Tensor& moved, const at::Tensor& now, const at::Tensor& nonnegative) {
  return at::where(moved.lt(0).logical_and_(now.ge(0)).logical_and_(nonnegative), now, moved);
}

}  // namespace torchext
