#include "kfac/precondition/tiled_product.h"

#include <algorithm>

#include <ATen/Parallel.h>

namespace torchext {
namespace {

std::size_t bytesOf(const TileBlocks& blocks) { return blocks.capacity() * sizeof(TileBlocks::value_type); }

}  // namespace

std::size_t TiledProduct::Work::bytes() const { return bytesOf(gradient) + bytesOf(middle); }

std::size_t TiledProduct::bytes() const { return bytesOf(outputs_) + bytesOf(inputs_); }

#if TORCHEXT_TILES

namespace {

using cpu::kTileBlock;
using cpu::TileBlock;
using cpu::tileBlocks;

// Of a right operand's columns of blocks, so many that they stay in a second-level cache while rows go by.
std::int64_t columnsAtOnce(std::int64_t steps) {
  constexpr auto kBytes = std::int64_t{1} << 20;
  return std::max<std::int64_t>(1, kBytes / (steps * static_cast<std::int64_t>(sizeof(TileBlock))));
}

// Calls work(row, column) for all blocks of a product's rows [begin, end), in an order that keeps to the caches.
template <class Work>
void forBlocks(std::int64_t begin, std::int64_t end, std::int64_t columns, std::int64_t steps, const Work& work) {
  const std::int64_t at_once = columnsAtOnce(steps);
  for (std::int64_t first = 0; first < columns; first += at_once) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t column = first; column < std::min(columns, first + at_once); ++column) {
        work(row, column);
      }
    }
  }
}

// Rows of blocks on torch's threads, where there is enough to do for another one.
template <class Work>
void forRows(std::int64_t rows, std::int64_t columns, std::int64_t steps, const Work& work) {
  constexpr std::int64_t kEnough = 256;  // products of two blocks: some 30 us
  at::parallel_for(0, rows, std::max<std::int64_t>(1, kEnough / (columns * steps)), work);
}

void fit(TileBlocks& blocks, std::int64_t count) {
  if (blocks.size() < static_cast<std::size_t>(count)) {
    blocks.resize(static_cast<std::size_t>(count));
  }
}

}  // namespace

void TiledProduct::prepare(const at::Tensor& outputs, const at::Tensor& inputs, std::int64_t begin,
                           std::int64_t count) {
  const std::int64_t groups = outputs.size(0);
  const std::int64_t out = outputs.size(1);
  const std::int64_t in = inputs.size(1);
  if (!of_outputs_.is_same(outputs)) {
    const std::int64_t rows = tileBlocks(out);
    fit(outputs_, groups * rows * rows);
    for (std::int64_t block = 0; block < groups * rows; ++block) {
      const float* data = outputs.const_data_ptr<float>() + block / rows * out * out;
      cpu::layLeft({data, out, out, out}, block % rows, out, &outputs_[static_cast<std::size_t>(block * rows)]);
    }
    of_outputs_ = outputs;
  }
  if (!of_inputs_.is_same(inputs) || begin_ != begin || count_ != count) {
    const std::int64_t columns = tileBlocks(count);
    const std::int64_t steps = tileBlocks(in);
    fit(inputs_, groups * columns * steps);
    for (std::int64_t block = 0; block < groups * columns; ++block) {
      const float* data = inputs.const_data_ptr<float>() + block / columns * in * in + begin;
      cpu::layRight({data, in, in, count}, block % columns, &inputs_[static_cast<std::size_t>(block * steps)]);
    }
    of_inputs_ = inputs;
    begin_ = begin;
    count_ = count;
  }
}

void TiledProduct::compute(const Gradient& gradient, const Result& result, Work& work) const {
  const std::int64_t groups = of_outputs_.size(0);
  const std::int64_t out = of_outputs_.size(1);
  const std::int64_t in = of_inputs_.size(1);
  const std::int64_t rows = tileBlocks(out);
  const std::int64_t steps = tileBlocks(in);
  const std::int64_t columns = tileBlocks(count_);
  fit(work.gradient, rows * steps);
  fit(work.middle, columns * rows);
  TileBlock* of_gradient = work.gradient.data();
  TileBlock* middle = work.middle.data();
  for (std::int64_t group = 0; group < groups; ++group) {
    const float* bias = gradient.bias != nullptr ? gradient.bias + group * out : nullptr;
    const cpu::TileSource source{gradient.weight + group * out * gradient.columns, gradient.columns, out,
                                 gradient.columns, bias};
    const TileBlock* inputs = inputs_.data() + group * columns * steps;
    forRows(rows, columns, steps, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        cpu::layLeft(source, row, in, of_gradient + row * steps);
      }
      cpu::configureTiles();
      forBlocks(begin, end, columns, steps, [&](std::int64_t row, std::int64_t column) {
        cpu::multiplyToRight(of_gradient + row * steps, inputs + column * steps, steps, middle[column * rows + row]);
      });
      cpu::releaseTiles();
    });
    const TileBlock* outputs = outputs_.data() + group * rows * rows;
    float* to = result.weight + group * out * result.columns;
    float* to_bias = result.bias != nullptr ? result.bias + group * out : nullptr;
    forRows(rows, columns, rows, [&](std::int64_t begin, std::int64_t end) {
      cpu::configureTiles();
      forBlocks(begin, end, columns, rows, [&](std::int64_t row, std::int64_t column) {
        const std::int64_t first_row = row * kTileBlock;
        const std::int64_t first = column * kTileBlock;
        // The column of the bias, which is the last one, may have a block of its own.
        const std::int64_t of_weight = std::min(kTileBlock, result.columns - first);
        const bool last = to_bias != nullptr && of_weight < kTileBlock;
        cpu::multiplyToMatrix(outputs + row * rows, middle + column * rows, rows,
                              to + first_row * result.columns + first, result.columns,
                              std::min(kTileBlock, out - first_row), of_weight, last ? to_bias + first_row : nullptr);
      });
      cpu::releaseTiles();
    });
  }
}

void TiledProduct::computeHalves(const Rows& given, float* left, float* right, Work& work) const {
  const std::int64_t out = of_outputs_.size(1);
  const std::int64_t in = of_inputs_.size(1);
  const std::int64_t rows = tileBlocks(out);
  const std::int64_t steps = tileBlocks(in);
  const std::int64_t columns = tileBlocks(count_);
  const std::int64_t samples = tileBlocks(given.count);
  fit(work.gradient, samples * std::max(steps, rows));
  TileBlock* laid = work.gradient.data();
  const cpu::TileSource of_inputs{given.inputs, given.columns, given.count, given.columns, given.ones};
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    cpu::layLeft(of_inputs, sample, in, laid + sample * steps);
  }
  forRows(columns, samples, steps, [&](std::int64_t begin, std::int64_t end) {
    cpu::configureTiles();
    for (std::int64_t column = begin; column < end; ++column) {
      const std::int64_t first = column * kTileBlock;
      for (std::int64_t sample = 0; sample < samples; ++sample) {
        const std::int64_t row = sample * kTileBlock;
        cpu::multiplyToMatrix(laid + sample * steps, inputs_.data() + column * steps, steps,
                              right + row * count_ + first, count_, std::min(kTileBlock, given.count - row),
                              std::min(kTileBlock, count_ - first), nullptr);
      }
    }
    cpu::releaseTiles();
  });
  const cpu::TileSource of_gradients{given.gradients, given.count, out, given.count};
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    cpu::layRight(of_gradients, sample, laid + sample * rows);
  }
  forRows(rows, samples, rows, [&](std::int64_t begin, std::int64_t end) {
    cpu::configureTiles();
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t first = row * kTileBlock;
      for (std::int64_t sample = 0; sample < samples; ++sample) {
        const std::int64_t column = sample * kTileBlock;
        cpu::multiplyToMatrix(outputs_.data() + row * rows, laid + sample * rows, rows,
                              left + first * given.count + column, given.count, std::min(kTileBlock, out - first),
                              std::min(kTileBlock, given.count - column), nullptr);
      }
    }
    cpu::releaseTiles();
  });
}

void TiledProduct::joinHalves(const Halves& halves, const Result& result, Work& work) {
  const std::int64_t rows = tileBlocks(halves.outputs);
  const std::int64_t columns = tileBlocks(halves.columns);
  const std::int64_t samples = tileBlocks(halves.count);
  fit(work.gradient, rows * samples);
  fit(work.middle, columns * samples);
  TileBlock* left = work.gradient.data();
  TileBlock* right = work.middle.data();
  const cpu::TileSource of_left{halves.left, halves.count, halves.outputs, halves.count};
  for (std::int64_t row = 0; row < rows; ++row) {
    cpu::layLeft(of_left, row, halves.count, left + row * samples);
  }
  const cpu::TileSource of_right{halves.right, halves.columns, halves.count, halves.columns};
  for (std::int64_t column = 0; column < columns; ++column) {
    cpu::layRight(of_right, column, right + column * samples);
  }
  forRows(rows, columns, samples, [&](std::int64_t begin, std::int64_t end) {
    cpu::configureTiles();
    forBlocks(begin, end, columns, samples, [&](std::int64_t row, std::int64_t column) {
      const std::int64_t first_row = row * kTileBlock;
      const std::int64_t first = column * kTileBlock;
      const std::int64_t of_weight = std::min(kTileBlock, result.columns - first);
      const bool last = result.bias != nullptr && of_weight < kTileBlock;
      cpu::multiplyToMatrix(left + row * samples, right + column * samples, samples,
                            result.weight + first_row * result.columns + first, result.columns,
                            std::min(kTileBlock, halves.outputs - first_row), of_weight,
                            last ? result.bias + first_row : nullptr);
    });
    cpu::releaseTiles();
  });
}

#else

void TiledProduct::prepare(const at::Tensor&, const at::Tensor&, std::int64_t, std::int64_t) {}

void TiledProduct::compute(const Gradient&, const Result&, Work&) const {}

void TiledProduct::computeHalves(const Rows&, float*, float*, Work&) const {}

void TiledProduct::joinHalves(const Halves&, const Result&, Work&) {}

#endif

}  // namespace torchext
