// triangle is what one GPU thread does to make packed triangles of full matrices and back; free of torch and of CUDA.
//
// A packed triangle (packed_triangle.h) holds the rows of the upper triangle one after the other. Packing
// goes row by row: both sides are runs of memory. Unpacking goes by tiles of kTile x kTile elements of the upper half:
// loadTile() reads a tile's rows into shared memory, and after a barrier storeTile() writes it to both halves of the
// matrix, the lower one transposed, so that both writes are runs as well. The kernels (cuda/factor_launch.cu) add
// nothing but the numbers of blocks and threads; tests/cpp/kernels run these functions on the host, thread by thread.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define TORCHEXT_HOST_DEVICE __host__ __device__
#else
#define TORCHEXT_HOST_DEVICE
#endif

namespace torchext::triangle {

// Where row `row` of a packed d x d triangle begins, that is the place of element (row, row).
TORCHEXT_HOST_DEVICE constexpr std::int64_t rowBegin(std::int64_t row, std::int64_t d) {
  return row * d - row * (row - 1) / 2;
}
TORCHEXT_HOST_DEVICE constexpr std::int64_t packedSize(std::int64_t d) { return d * (d + 1) / 2; }

// Thread `lane` of `lanes`: its elements of one row of full, whose rows are `stride` apart, into packed or added to it.
template <class T>
TORCHEXT_HOST_DEVICE void packRow(const T* full, std::int64_t stride, std::int64_t d, std::int64_t row, bool add,
                                  std::int64_t lane, std::int64_t lanes, T* packed) {
  const T* from = full + row * stride;
  T* to = packed + rowBegin(row, d) - row;
  for (std::int64_t column = row + lane; column < d; column += lanes) {
    to[column] = add ? to[column] + from[column] : from[column];
  }
}

constexpr int kTile = 32;
// Tiles of the upper half, the diagonal ones included; as many as a packed triangle of tiles.
TORCHEXT_HOST_DEVICE constexpr std::int64_t tilesOf(std::int64_t d) { return packedSize((d + kTile - 1) / kTile); }

struct Tile {
  std::int64_t top = 0;   // row of its first element
  std::int64_t left = 0;  // column
};

// The tile of a number below tilesOf(d), row by row. Counted from the end rows of tiles are 1, 2, 3, ... long; a square
// root finds the row to within one.
TORCHEXT_HOST_DEVICE inline Tile tileAt(std::int64_t number, std::int64_t d) {
  const std::int64_t side = (d + kTile - 1) / kTile;
  const std::int64_t rest = packedSize(side) - 1 - number;
  auto above = static_cast<std::int64_t>(std::sqrt(2.0 * static_cast<double>(rest)));
  while (packedSize(above) > rest) {
    --above;
  }
  while (packedSize(above + 1) <= rest) {
    ++above;
  }
  const std::int64_t row = side - 1 - above;
  const std::int64_t column = side - 1 - (rest - packedSize(above));
  return {row * kTile, column * kTile};
}

// buffer: [kTile][kTile + 1], the odd stride against bank conflicts. Thread (x, y) of kTile x lines takes column x of
// the rows y, y + lines, ...
template <class T>
TORCHEXT_HOST_DEVICE void loadTile(const T* packed, std::int64_t d, Tile tile, int x, int y, int lines, T* buffer) {
  const std::int64_t column = tile.left + x;
  for (int line = y; line < kTile; line += lines) {
    const std::int64_t row = tile.top + line;
    if (row <= column && column < d) {
      buffer[line * (kTile + 1) + x] = packed[rowBegin(row, d) + column - row];
    }
  }
}

template <class T>
TORCHEXT_HOST_DEVICE void storeTile(const T* buffer, std::int64_t d, Tile tile, int x, int y, int lines, T* full) {
  for (int line = y; line < kTile; line += lines) {
    const std::int64_t row = tile.top + line;
    const std::int64_t column = tile.left + x;
    if (row <= column && column < d) {
      full[row * d + column] = buffer[line * (kTile + 1) + x];
    }
    // Transposed: this thread's row of the lower half is a column of the tile.
    const std::int64_t low_row = tile.left + line;
    const std::int64_t low_column = tile.top + x;
    if (low_column < low_row && low_row < d) {
      full[low_row * d + low_column] = buffer[x * (kTile + 1) + line];
    }
  }
}

}  // namespace torchext::triangle
