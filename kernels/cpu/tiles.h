// Products of float matrices on the matrix tiles of an x86-64 processor (AMX); free of torch.
//
// A tile multiplies bfloat16 at 16 times the rate of AVX-512 in float. Here a float is the sum of two of them, x = high
// + low up to 2^-16 of x, and a product of matrices is three of theirs, summed in float: high high + high low + low
// high. What is left out, low low, is at most 2^-16 of each product as well: 16 bits, where float has 24; sums of
// products of random signs are right to 6e-6. (Three bfloat16 would hold all 24 bits, and take six products.)
//
// Operands are laid out in blocks of 32 x 32, zeros behind their last row and column. A matrix that is used often is
// laid out once. A left operand's blocks lie row of blocks by row of blocks, a right one's column by column, so that a
// product reads both in order. Each thread that multiplies has configured its tiles, and releases them afterwards.
//
// Without tiles in the target there is only cpuHasTiles().
#pragma once

#include "kernels/cpu/isa.h"

#if TORCHEXT_X86_DISPATCH && defined(__linux__)
#define TORCHEXT_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#define TORCHEXT_TARGET_TILES \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")))
#else
#define TORCHEXT_TILES 0
#endif

namespace torchext::cpu {

// Whether the processor has tiles for bfloat16 and the system lets this process use them, which the first call asks
// for.
inline bool cpuHasTiles() {
#if TORCHEXT_TILES
  static const bool has = [] {
    constexpr unsigned kTiles = (1U << 22U) | (1U << 24U);  // AMX-BF16 and AMX-TILE: CPUID leaf 7, EDX
    constexpr unsigned kBFloat16 = 1U << 5U;                // AVX512_BF16: leaf 7, subleaf 1, EAX
    constexpr long kRequest = 0x1023;                       // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;                          // its number among the states of a thread
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    const bool tiles = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kTiles) == kTiles;
    const bool halves = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kBFloat16) != 0;
    return tiles && halves && cpuHasAvx512() && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return has;
#else
  return false;
#endif
}

#if TORCHEXT_TILES

inline constexpr std::int64_t kTileBlock = 32;  // rows and columns of a block

inline constexpr std::int64_t tileBlocks(std::int64_t size) { return (size + kTileBlock - 1) / kTileBlock; }

// 32 x 32 elements of an operand: the high parts of its two tiles, then their low parts. A left operand's tiles are 16
// rows each; a right one's are 16 columns, in which the elements of two rows lie side by side.
struct alignas(64) TileBlock {
  std::array<std::array<std::uint16_t, 512>, 4> tiles;
};

// A matrix in memory: rows `stride` apart; `last`, if given, is one more column.
struct TileSource {
  const float* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  const float* last = nullptr;
};

namespace detail {

inline constexpr std::int64_t kLanes = 16;

// Of the elements from `begin` on, those before `end`.
inline __mmask16 lanesBefore(std::int64_t begin, std::int64_t end) {
  return static_cast<__mmask16>((1U << static_cast<unsigned>(std::clamp<std::int64_t>(end - begin, 0, kLanes))) - 1U);
}

struct Split {
  __m256i high;
  __m256i low;
};

// As the upper halves of 32-bit lanes, which makes a bfloat16 a float. Masks of ones: GCC 12 takes what the plain
// intrinsics leave open for used uninitialized.
TORCHEXT_TARGET_TILES inline __m512i widen(__m256i halves) {
  return _mm512_maskz_cvtepu16_epi32(__mmask16{0xFFFF}, halves);
}
TORCHEXT_TARGET_TILES inline __m512i toUpper(__m512i lanes) {
  return _mm512_maskz_slli_epi32(__mmask16{0xFFFF}, lanes, 16);
}

TORCHEXT_TARGET_TILES inline Split split(__m512 x) {
  const auto high = __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(x));
  const __m512 back = _mm512_castsi512_ps(toUpper(widen(high)));
  return {high, __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(_mm512_sub_ps(x, back)))};
}

TORCHEXT_TARGET_TILES inline __m512i sideBySide(__m256i first, __m256i second) {
  return _mm512_or_si512(widen(first), toUpper(widen(second)));
}

// Two rows, and 16 columns that begin with one of the block's halves, of a right operand.
TORCHEXT_TARGET_TILES inline void putPair(TileBlock& to, std::size_t pair, std::size_t half, __m512 first,
                                          __m512 second) {
  const Split a = split(first);
  const Split b = split(second);
  _mm512_store_si512(&to.tiles[half][pair * kTileBlock], sideBySide(a.high, b.high));
  _mm512_store_si512(&to.tiles[2 + half][pair * kTileBlock], sideBySide(a.low, b.low));
}

// Tiles 0 to 3 (first 16 rows by first and last 16 columns, then the last 16 rows) = left right.
TORCHEXT_TARGET_TILES inline void multiplyBlocks(const TileBlock* left, const TileBlock* right, std::int64_t steps) {
  constexpr int kRow = 64;  // bytes
  // GCC's loads of tiles do not say that they read memory: what was laid out just before must be there.
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t step = 0; step < steps; ++step, ++left, ++right) {
    // Two tiles of each side at a time, eight loads for twelve products; the products are what takes the time.
    _tile_loadd(4, left->tiles[0].data(), kRow);
    _tile_loadd(6, right->tiles[2].data(), kRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right->tiles[3].data(), kRow);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left->tiles[1].data(), kRow);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(6, right->tiles[0].data(), kRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right->tiles[1].data(), kRow);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(4, left->tiles[2].data(), kRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left->tiles[3].data(), kRow);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

TORCHEXT_TARGET_TILES inline void storeTiles(float* to, std::int64_t stride) {
  const std::int64_t bytes = stride * static_cast<std::int64_t>(sizeof(float));
  _tile_stored(0, to, bytes);
  _tile_stored(1, to + kLanes, bytes);
  _tile_stored(2, to + kLanes * stride, bytes);
  _tile_stored(3, to + kLanes * stride + kLanes, bytes);
}

}  // namespace detail

// All eight tiles of the calling thread: 16 rows of 64 bytes.
TORCHEXT_TARGET_TILES inline void configureTiles() {
  struct alignas(64) Configuration {
    std::uint8_t palette;
    std::uint8_t start_row;
    std::array<std::uint8_t, 14> reserved;
    std::array<std::uint16_t, 16> row_bytes;
    std::array<std::uint8_t, 16> rows;
  };
  // A constant: GCC's intrinsic says that it reads eight bytes of the 64, and the stores of others might be left out.
  static constexpr Configuration kConfiguration{
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&kConfiguration);
}

TORCHEXT_TARGET_TILES inline void releaseTiles() { _tile_release(); }

// One row of blocks of a left operand that has `inner` columns (those of `from`, zeros behind them).
TORCHEXT_TARGET_TILES inline void layLeft(const TileSource& from, std::int64_t row_of_blocks, std::int64_t inner,
                                          TileBlock* to) {
  using detail::kLanes;
  const std::int64_t first = row_of_blocks * kTileBlock;
  for (std::int64_t row = 0; row < kTileBlock; ++row) {
    const auto tile = static_cast<std::size_t>(row / kLanes);
    const auto place = static_cast<std::size_t>(row % kLanes * kTileBlock);
    const std::int64_t columns = first + row < from.rows ? from.columns : 0;
    const float* data = columns > 0 ? from.data + (first + row) * from.stride : nullptr;
    for (std::int64_t column = 0; column < tileBlocks(inner) * kTileBlock; column += kLanes) {
      const __mmask16 lanes = detail::lanesBefore(column, columns);
      const auto [high, low] =
          detail::split(lanes != 0 ? _mm512_maskz_loadu_ps(lanes, data + column) : _mm512_setzero_ps());
      TileBlock& block = to[column / kTileBlock];
      const std::size_t at = place + static_cast<std::size_t>(column % kTileBlock);
      _mm256_store_si256(reinterpret_cast<__m256i*>(&block.tiles[tile][at]), high);
      _mm256_store_si256(reinterpret_cast<__m256i*>(&block.tiles[2 + tile][at]), low);
    }
  }
  if (from.last == nullptr) {
    return;
  }
  TileBlock& block = to[from.columns / kTileBlock];
  const auto column = static_cast<std::size_t>(from.columns % kTileBlock);
  for (std::int64_t row = 0; row < kTileBlock; row += kLanes) {
    const __mmask16 lanes = detail::lanesBefore(first + row, from.rows);
    const auto tile = static_cast<std::size_t>(row / kLanes);
    const auto [high, low] =
        detail::split(lanes != 0 ? _mm512_maskz_loadu_ps(lanes, from.last + first + row) : _mm512_setzero_ps());
    alignas(32) std::array<std::uint16_t, kLanes> highs;
    alignas(32) std::array<std::uint16_t, kLanes> lows;
    _mm256_store_si256(reinterpret_cast<__m256i*>(highs.data()), high);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lows.data()), low);
    for (std::size_t i = 0; i < highs.size(); ++i) {
      block.tiles[tile][i * kTileBlock + column] = highs[i];
      block.tiles[2 + tile][i * kTileBlock + column] = lows[i];
    }
  }
}

// One column of blocks of a right operand. `from` has no last column.
TORCHEXT_TARGET_TILES inline void layRight(const TileSource& from, std::int64_t column_of_blocks, TileBlock* to) {
  for (std::int64_t row = 0; row < tileBlocks(from.rows) * kTileBlock; row += 2) {
    for (const std::int64_t half : {0, 1}) {
      const std::int64_t column = column_of_blocks * kTileBlock + half * detail::kLanes;
      const auto load = [&](std::int64_t of) TORCHEXT_TARGET_TILES {
        const __mmask16 lanes = of < from.rows ? detail::lanesBefore(column, from.columns) : __mmask16{0};
        return lanes != 0 ? _mm512_maskz_loadu_ps(lanes, from.data + of * from.stride + column) : _mm512_setzero_ps();
      };
      detail::putPair(to[row / kTileBlock], static_cast<std::size_t>(row % kTileBlock / 2),
                      static_cast<std::size_t>(half), load(row), load(row + 1));
    }
  }
}

// A block of left right, laid out as a block of a right operand. left and right: `steps` blocks.
TORCHEXT_TARGET_TILES inline void multiplyToRight(const TileBlock* left, const TileBlock* right, std::int64_t steps,
                                                  TileBlock& to) {
  alignas(64) std::array<float, kTileBlock * kTileBlock> block;
  detail::multiplyBlocks(left, right, steps);
  detail::storeTiles(block.data(), kTileBlock);
  for (std::size_t pair = 0; pair < kTileBlock / 2; ++pair) {
    for (const std::size_t half : {0U, 1U}) {
      const float* first = &block[2 * pair * kTileBlock + half * detail::kLanes];
      detail::putPair(to, pair, half, _mm512_load_ps(first), _mm512_load_ps(first + kTileBlock));
    }
  }
}

// The same into memory: rows and columns of it that there are, up to 32; `last`, if given, takes the column behind
// them.
TORCHEXT_TARGET_TILES inline void multiplyToMatrix(const TileBlock* left, const TileBlock* right, std::int64_t steps,
                                                   float* to, std::int64_t stride, std::int64_t rows,
                                                   std::int64_t columns, float* last) {
  detail::multiplyBlocks(left, right, steps);
  if (rows == kTileBlock && columns == kTileBlock) {
    detail::storeTiles(to, stride);
    return;
  }
  alignas(64) std::array<float, kTileBlock * kTileBlock> block;
  detail::storeTiles(block.data(), kTileBlock);
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* from = block.data() + row * kTileBlock;
    std::copy_n(from, columns, to + row * stride);
    if (last != nullptr) {
      last[row] = from[columns];
    }
  }
}

#endif  // TORCHEXT_TILES

}  // namespace torchext::cpu
