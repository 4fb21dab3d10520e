// DeferredGram: the samples of which a factor's running average is still to be made.
//
// A running average is linear in the steps' sums of x x^T, and one product of many samples takes half the time of as
// many in small ones, each of which reads and writes the whole matrix. So the samples of several steps are kept as they
// are, with the weight that each step has by now, and their products are made together when somebody asks for the
// average, or when there are enough. The average is the same, to rounding.
//
// A step is open() while samples are added; merge() closes it, discard() drops it. CPU, T float or double. Not
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "kfac/base/kfac_layer.h"

namespace torchext {

template <class T>
class DeferredGram {
 public:
  // Of a step: with more, its own product is as good.
  static constexpr std::int64_t kMostOfAStep = 256;

  // dim: of the matrix; one more than an element has where a 1 stands behind each sample.
  explicit DeferredGram(std::int64_t dim) : dim_(dim) {}

  // Samples [count, width], width being dim or one less, added to the open step's. False: no place; settle() makes
  // some, where `count` and those of the open step are no more than kMostOfAStep.
  bool add(const T* samples, std::int64_t count, std::int64_t width);
  // How many the open step has.
  std::int64_t open() const { return count_ - closed_; }
  // The diagonal's sum over the open step: finite if and only if all of its products are.
  T trace() const { return trace_; }
  // The triangle of the sum of x x^T over the open step, packed.
  void product(Scratch& scratch, T* packed) const;
  // Closes the step: average = decay average + weight sum of x x^T.
  void merge(double decay, double weight);
  void discard();
  // Brings the average, packed, up to date with the closed steps; an open one stays.
  void settle(Scratch& scratch, T* average);
  std::size_t bytes() const { return samples_.defined() ? samples_.nbytes() : 0; }

 private:
  struct Step {
    std::int64_t end = 0;  // of its samples
    double weight = 0;
  };
  T* sample(std::int64_t number) { return samples_.mutable_data_ptr<T>() + number * dim_; }
  const T* sample(std::int64_t number) const { return samples_.const_data_ptr<T>() + number * dim_; }
  void multiply(std::int64_t begin, std::int64_t end, Scratch& scratch, T keep, T* packed) const;

  std::int64_t dim_;
  at::Tensor samples_;       // [places, dim]
  std::int64_t count_ = 0;   // of samples that are kept
  std::int64_t closed_ = 0;  // of those, in steps that are merged
  std::vector<Step> steps_;  // closed ones
  double faded_ = 1;         // what their decays have left of the average
  T trace_ = 0;
};

}  // namespace torchext
