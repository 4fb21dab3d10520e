// Patches of images: the part of an input that a convolution's kernel sees at each output position.
//
// One, two or three spatial dimensions are counted as three, those in front of size 1. Rows of a patch matrix are
// places of the kernel, its columns positions. Plain loops over memory that the caller owns; thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace torchext {

struct PatchWindow {
  using Three = std::array<std::int64_t, 3>;
  Three size{1, 1, 1};      // of the image
  Three kernel{1, 1, 1};    // places
  Three stride{1, 1, 1};    // elements of the image from position to position
  Three dilation{1, 1, 1};  // from place to place
  Three before{0, 0, 0};    // the first position begins so many elements before the image; negative: inside it
  Three out{1, 1, 1};       // positions
};

// One row of patches: what `place` sees at all positions, zeros outside the image. Runs along the last dimension.
template <class T>
void copyShifted(const T* image, const PatchWindow& w, const PatchWindow::Three& place, T* row) {
  for (std::int64_t d = 0; d < w.out[0]; ++d) {
    const std::int64_t z = d * w.stride[0] + place[0] * w.dilation[0] - w.before[0];
    for (std::int64_t h = 0; h < w.out[1]; ++h, row += w.out[2]) {
      const std::int64_t y = h * w.stride[1] + place[1] * w.dilation[1] - w.before[1];
      if (z < 0 || z >= w.size[0] || y < 0 || y >= w.size[1]) {
        std::fill(row, row + w.out[2], T(0));
        continue;
      }
      const T* line = image + (z * w.size[1] + y) * w.size[2];
      const std::int64_t shift = place[2] * w.dilation[2] - w.before[2];
      const std::int64_t stride = w.stride[2];
      // x * stride + shift lies in [0, size) for x in [begin, end).
      const std::int64_t begin = shift < 0 ? std::min((-shift + stride - 1) / stride, w.out[2]) : 0;
      const std::int64_t end =
          w.size[2] <= shift ? begin : std::clamp((w.size[2] - shift + stride - 1) / stride, begin, w.out[2]);
      std::fill(row, row + begin, T(0));
      for (std::int64_t x = begin; x < end; ++x) {
        row[x] = line[x * stride + shift];
      }
      std::fill(row + end, row + w.out[2], T(0));
    }
  }
}

}  // namespace torchext
