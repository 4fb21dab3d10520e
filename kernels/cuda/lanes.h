// lanes lets nvcc compile the code of the CUDA kernels for the device, and any C++ compiler for the host. So tests on
// machines without a GPU run the very same code.
//
// A group is a power of two of lanes, at most kMostLanes, that work on one item and add up across:
//   each(f)    f(lane, own) for every lane; own is where the values of this lane are in arrays of Group::kOwn elements
//   all(x, op) all lanes' x[own] combined, in the order of a butterfly; every lane gets the same bits
//   first(x)   what lane 0 has in x[own]
// A lane must not read what another lane wrote to memory in the same item: it is told by all() or first(). On the
// device a lane is a thread and kOwn is 1 (DeviceGroup in device_run.h); HostGroup loops over its lanes.
#pragma once

#include <cstddef>

#if defined(__CUDACC__)
#define TORCHEXT_HD __host__ __device__ __forceinline__
#else
#define TORCHEXT_HD inline
#endif

#if defined(__CUDA_ARCH__)
#define TORCHEXT_UNROLL _Pragma("unroll")
#else  // g++ knows no such pragma, nor when nvcc calls it
#define TORCHEXT_UNROLL
#endif

namespace torchext::cuda {

inline constexpr int kMostLanes = 32;

struct Plus {
  template <class M>
  TORCHEXT_HD M operator()(M a, M b) const {
    return a + b;
  }
};

struct Larger {
  template <class M>
  TORCHEXT_HD M operator()(M a, M b) const {
    return a < b ? b : a;
  }
};

// The least power of two that is not below `wanted`, at most kMostLanes.
TORCHEXT_HD int lanesFor(int wanted) {
  int lanes = 1;
  while (lanes < wanted && lanes < kMostLanes) {
    lanes *= 2;
  }
  return lanes;
}

class HostGroup {
 public:
  static constexpr int kOwn = kMostLanes;

  explicit HostGroup(int lanes) : lanes_(lanes) {}

  int lanes() const { return lanes_; }
  template <class Body>
  void each(Body&& body) const {
    for (int lane = 0; lane < lanes_; ++lane) {
      body(lane, lane);
    }
  }
  template <class M, class Op>
  M all(const M* values, Op op) const {
    M now[kMostLanes] = {};
    M next[kMostLanes] = {};
    for (int lane = 0; lane < lanes_; ++lane) {
      now[lane] = values[lane];
    }
    for (int offset = lanes_ / 2; offset > 0; offset /= 2) {
      for (int lane = 0; lane < lanes_; ++lane) {
        next[lane] = op(now[lane], now[lane ^ offset]);
      }
      for (int lane = 0; lane < lanes_; ++lane) {
        now[lane] = next[lane];
      }
    }
    return now[0];
  }
  template <class M>
  M first(const M* values) const {
    return values[0];
  }

 private:
  int lanes_;
};

}  // namespace torchext::cuda
