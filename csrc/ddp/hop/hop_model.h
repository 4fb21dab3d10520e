// HopModel: an attached model as one block of bytes, which is what Hop workers exchange, and the weighted sum of
// blocks.
//
// A block holds the parameters, then the floating-point buffers, those of one dtype and device together, each part
// aligned to 64 bytes. Blocks lie in memory of the host.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ATen/ATen.h>

#include "ddp/common/flat_buckets.h"
#include "ddp/common/tensors_in_place.h"

namespace torchext {

class HopModel {
 public:
  static constexpr std::size_t kAlignment = 64;

  struct Input {
    const std::byte* block;
    double weight;
  };

  // The model's own tensors, in registration order, floating point.
  HopModel(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers);

  // Of a block; a multiple of kAlignment.
  std::size_t bytes() const { return bytes_; }

  void pack(std::byte* block) const;
  // The tensors become the weighted sum of one or more blocks. packed: the block that was packed of this model before
  // a forward may have changed its buffers; what the forward added to them is added to the sum. writes: of the user,
  // since then, into the parameters; see TensorsInPlace.
  void assign(std::span<const Input> inputs, const std::byte* packed, const std::vector<Write>& writes) const;

  // What a block holds. For collectives over all ranks.
  const FlatBuckets& parameters() const { return parameters_; }
  const FlatBuckets& buffers() const { return buffers_; }

 private:
  std::size_t parts() const { return parameters_.size() + buffers_.size(); }
  const FlatBucket& part(std::size_t index) const {
    return index < parameters_.size() ? parameters_[index] : buffers_[index - parameters_.size()];
  }

  FlatBuckets parameters_;
  FlatBuckets buffers_;
  std::vector<std::size_t> offsets_;  // of the parts in a block
  std::size_t bytes_ = 0;
};

}  // namespace torchext
