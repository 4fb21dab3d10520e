// Patches of images as rows of a matrix: what a convolution's kernel sees at a position, position after position.
//
// By rows, for X^T X of such a matrix takes half the time of Y Y^T of its transpose, whose rows lie a power of two
// apart in memory. Images have their padding around them already, so that all of a patch lies in memory, in short runs:
// asking for bounds, or calling memcpy, would cost more than the elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace torchext {

struct Patches {
  using Four = std::array<std::int64_t, 4>;
  // How many there are in each dimension, and how many elements of memory lie from one to the next.
  struct Axes {
    Four count{1, 1, 1, 1};
    Four step{0, 0, 0, 0};
    std::int64_t total() const { return count[0] * count[1] * count[2] * count[3]; }
  };
  Axes positions;  // rows: images, then three spatial dimensions
  Axes places;     // columns: channels, then the kernel's three

  // first: what the first place sees at the first position. rows: [positions, places], without gaps.
  template <class T>
  void copy(const T* first, T* rows) const {
    if (places.count[3] == 3 && places.step[3] == 1) {
      copyRows<3>(first, rows);
    } else {
      copyRows<0>(first, rows);
    }
  }

 private:
  // kWidth: of the kernel, its places side by side in memory; 0: not known here.
  template <std::size_t kWidth, class T>
  void copyRows(const T* first, T* to) const {
    for (std::int64_t image = 0; image < positions.count[0]; ++image) {
      for (std::int64_t z = 0; z < positions.count[1]; ++z) {
        for (std::int64_t y = 0; y < positions.count[2]; ++y) {
          const T* from = first + image * positions.step[0] + z * positions.step[1] + y * positions.step[2];
          for (std::int64_t x = 0; x < positions.count[3]; ++x, from += positions.step[3]) {
            to = copyRow<kWidth>(from, to);
          }
        }
      }
    }
  }

  template <std::size_t kWidth, class T>
  T* copyRow(const T* first, T* to) const {
    for (std::int64_t channel = 0; channel < places.count[0]; ++channel) {
      for (std::int64_t z = 0; z < places.count[1]; ++z) {
        const T* from = first + channel * places.step[0] + z * places.step[1];
        for (std::int64_t y = 0; y < places.count[2]; ++y, from += places.step[2]) {
          if constexpr (kWidth > 0) {
            for (std::size_t x = 0; x < kWidth; ++x) {
              *to++ = from[x];
            }
          } else {
            for (std::int64_t x = 0; x < places.count[3]; ++x) {
              *to++ = from[x * places.step[3]];
            }
          }
        }
      }
    }
    return to;
  }
};

}  // namespace torchext
