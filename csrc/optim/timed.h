// Seconds, and where they go.
#pragma once

#include <chrono>

namespace torchext {

inline double monotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds the seconds of a block to a sum.
class Timed {
 public:
  explicit Timed(double& sum) : sum_(sum), start_(monotonicSeconds()) {}
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() { sum_ += monotonicSeconds() - start_; }

 private:
  double& sum_;
  double start_;
};

}  // namespace torchext
