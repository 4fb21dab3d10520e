// A device for kernels/cuda/bag_run.h that is no GPU: loops over items and lanes.
//
// Items must not depend on each other. With one thread they run from the last to the first; with more they run at once,
// which the thread sanitizer watches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include "kernels/cuda/bag_run.h"

namespace torchext::cuda {

class HostDevice {
 public:
  explicit HostDevice(int threads = 1) : threads_(threads) {}

  template <class Item>
  void forEach(std::int64_t count, const Item& item) const {
    run(count, [&](std::int64_t i) { item(i); });
  }
  template <class Item>
  void forEachGroup(std::int64_t count, int lanes, const Item& item) const {
    run(count, [&](std::int64_t i) { item(HostGroup(lanes), i); });
  }
  void sort(const std::uint32_t* keys, std::uint32_t* sorted, const std::int32_t* positions, std::int32_t* order,
            std::int64_t count, int bits, void* /*memory*/, std::size_t /*bytes*/) const {
    const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
    std::vector<std::size_t> by_key(static_cast<std::size_t>(count));
    std::iota(by_key.begin(), by_key.end(), std::size_t{0});
    std::stable_sort(by_key.begin(), by_key.end(),
                     [&](std::size_t a, std::size_t b) { return (keys[a] & mask) < (keys[b] & mask); });
    for (std::size_t i = 0; i < by_key.size(); ++i) {
      sorted[i] = keys[by_key[i]];
      order[i] = positions[by_key[i]];
    }
  }

 private:
  template <class Body>
  void run(std::int64_t count, const Body& body) const {
    if (threads_ == 1) {
      for (std::int64_t i = count - 1; i >= 0; --i) {
        body(i);
      }
      return;
    }
    std::vector<std::thread> threads;
    for (int t = 0; t < threads_; ++t) {
      threads.emplace_back([&, t] {
        for (std::int64_t i = t; i < count; i += threads_) {
          body(i);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  int threads_;
};

}  // namespace torchext::cuda
