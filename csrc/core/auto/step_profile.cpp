#include "core/auto/step_profile.h"

#include <cmath>
#include <numeric>

#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr double kRounding = 1e-9;  // of sums of spans

void checkSeconds(const char* name, double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) {
    throwInvalid(name, seconds, "finite, 0 or more");
  }
}

// -1 or a position.
void checkPlace(const char* name, int place, std::size_t count, std::size_t gradient) {
  if (place < -1 || place >= static_cast<int>(count)) {
    throwInvalid(name, place, concat("-1..", static_cast<int>(count) - 1, "; it is of gradient ", gradient));
  }
}

}  // namespace

double StepProfile::computeSeconds() const {
  return std::accumulate(forward_seconds.begin(), forward_seconds.end(), backward_seconds);
}

std::size_t StepProfile::gradientBytes() const {
  std::size_t sum = 0;
  for (const Gradient& gradient : gradients) {
    sum += gradient.bytes;
  }
  return sum;
}

void checkProfile(const StepProfile& profile) {
  if (profile.gradients.empty()) {
    throwInvalid("number of gradients", 0, "1 or more");
  }
  for (const double seconds : profile.forward_seconds) {
    checkSeconds("forward_seconds", seconds);
  }
  checkSeconds("backward_seconds", profile.backward_seconds);
  checkSeconds("optimizer_seconds", profile.optimizer_seconds);
  for (std::size_t i = 0; i < profile.gradients.size(); ++i) {
    const Gradient& gradient = profile.gradients[i];
    checkSeconds("ready_seconds", gradient.ready_seconds);
    if (gradient.ready_seconds > profile.backward_seconds * (1 + kRounding)) {
      throwInvalid("ready_seconds", gradient.ready_seconds,
                   concat("at most backward_seconds, ", profile.backward_seconds, "; it is of gradient ", i));
    }
    if (gradient.kind < 0) {
      throwInvalid("kind", gradient.kind, concat("0 or more; it is of gradient ", i));
    }
    checkPlace("first_use", gradient.first_use, profile.forward_seconds.size(), i);
    checkPlace("layer", gradient.layer, profile.layers.size(), i);
  }
}

StepProfile stretched(StepProfile profile, double factor) {
  for (double& seconds : profile.forward_seconds) {
    seconds *= factor;
  }
  profile.backward_seconds *= factor;
  for (Gradient& gradient : profile.gradients) {
    gradient.ready_seconds *= factor;
  }
  return profile;
}

}  // namespace torchext::core
