#include "kfac/factors/deferred_gram.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/weighted_sum.h"
#include "kfac/linalg/matrix_product.h"
#include "kfac/linalg/reductions.h"

namespace torchext {
namespace {

// Products of so many samples are limited by arithmetic, no longer by reading and writing the matrix.
constexpr std::int64_t kMostKept = 640;
// Places that the first step makes: so many times its own samples, the steps of a common interval between updates of
// the inverses.
constexpr std::int64_t kPlacesOfSteps = 10;

}  // namespace

template <class T>
bool DeferredGram<T>::add(const T* samples, std::int64_t count, std::int64_t width) {
  if (count_ + count > kMostKept) {
    return false;
  }
  if (!samples_.defined() || count_ + count > samples_.size(0)) {
    if (count_ > 0 && open() < count_) {
      return false;  // a larger step than the first one: when the others are settled
    }
    const std::int64_t places = std::clamp(kPlacesOfSteps * (count_ + count), count_ + count, kMostKept);
    at::Tensor larger = at::empty({places, dim_}, at::TensorOptions(c10::CppTypeToScalarType<T>::value));
    if (count_ > 0) {
      larger.narrow(0, 0, count_).copy_(samples_.narrow(0, 0, count_));
    }
    samples_ = std::move(larger);
  }
  for (std::int64_t i = 0; i < count; ++i, samples += width) {
    T* to = sample(count_++);
    std::copy_n(samples, width, to);
    if (width < dim_) {
      to[width] = T(1);
    }
  }
  const std::int64_t added = count * dim_;
  trace_ += static_cast<T>(dotProduct(sample(count_ - count), sample(count_ - count), added));
  return true;
}

// packed = keep packed + the triangle of the sum over samples [begin, end).
template <class T>
void DeferredGram<T>::multiply(std::int64_t begin, std::int64_t end, Scratch& scratch, T keep, T* packed) const {
  T* full = scratch.get<T>(dim_ * dim_);
  symmetricProduct(sample(begin), dim_, dim_, end - begin, full, dim_);
  const std::array<T, 2> weights{keep, 1};
  for (std::int64_t row = 0; row < dim_; ++row) {
    const T* from = full + row * dim_ + row;
    const std::int64_t length = dim_ - row;
    if (keep == T(0)) {
      std::copy_n(from, length, packed);
    } else {
      const std::array<const T*, 2> terms{packed, from};
      cpu::weightedSum<T>(packed, terms, weights, static_cast<std::size_t>(length));
    }
    packed += length;
  }
}

template <class T>
void DeferredGram<T>::product(Scratch& scratch, T* packed) const {
  multiply(closed_, count_, scratch, T(0), packed);
}

template <class T>
void DeferredGram<T>::merge(double decay, double weight) {
  for (Step& step : steps_) {
    step.weight *= decay;
  }
  faded_ *= decay;
  steps_.push_back({count_, weight});
  closed_ = count_;
  trace_ = 0;
}

template <class T>
void DeferredGram<T>::discard() {
  count_ = closed_;
  trace_ = 0;
}

template <class T>
void DeferredGram<T>::settle(Scratch& scratch, T* average) {
  if (steps_.empty()) {
    return;
  }
  std::int64_t number = 0;
  for (const Step& step : steps_) {
    const std::array<T, 1> root{static_cast<T>(std::sqrt(step.weight))};
    const std::array<const T*, 1> data{sample(number)};
    cpu::weightedSum<T>(sample(number), data, root, static_cast<std::size_t>((step.end - number) * dim_));
    number = step.end;
  }
  multiply(0, closed_, scratch, static_cast<T>(faded_), average);
  std::copy(sample(closed_), sample(count_), sample(0));  // of the open step
  count_ -= closed_;
  closed_ = 0;
  steps_.clear();
  faded_ = 1;
}

template class DeferredGram<float>;
template class DeferredGram<double>;

}  // namespace torchext
