// The operators of the adaptive embedding bag (FIITED, Luo et al., arXiv 2401.04408): what all devices share.
//
// State of a table, all of it in tensors that the caller owns, so that state_dict, broadcasts and torch.compile see it.
// On CUDA all are on the pool's device but clock and lr, which stay on the CPU (kernels/cuda/bag_views.h).
//   pool     slots x chunk_dim   the values of resident chunks; float32, float64, float16 or bfloat16
//   state    0 to 2 tensors      of the fused optimizer: Adagrad (slots), Adam 2 x (slots x chunk_dim); float32, beside
//   a
//                                float64 pool float64
//   index    int32 or int64      which slot a chunk is in (chunk_index.h): empty int32 = identity (everything is
//                                resident), rows * chunks int32 = direct, int64 = hashed
//   utility  float32 or uint8    what a chunk is worth (chunk_utility.h): empty = none, rows * chunks float32 or
//                                uint8, or slots + cells uint8 with `sketch`
//   sketch   int32               keys of the sketch's cells, else empty
//   clock    2 float64, CPU      steps taken; the growing factor gamma^-n of utilities
//
// The data's path. Forward: ids -> index -> pool rows -> bags; nothing is written. Backward: ids grouped by row, each
// row's gradient summed once, then per chunk an update of pool and state (or a gradient), and utility for resident and
// absent chunks alike. Pruning, between steps: utilities -> selection -> index, and a list of copies for the pool. No
// operator changes the size of a tensor.
//
// Functional operators have no side effects; those that end in _ or take (a!) declare every tensor they write.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "csrc/core/embedding/chunk_index.h"
#include "csrc/core/embedding/chunk_utility.h"
#include "kernels/bag_batch.h"

namespace torchext::kernels {

// How a batch of ids is to be read; the arguments that the operators have in common.
struct BagLayout {
  const at::Tensor& ids;                     // 1-D, int32 or int64
  const std::optional<at::Tensor>& offsets;  // 1-D, int32 or int64; without: bags of bag_size ids
  std::int64_t bag_size;
  bool include_last_offset;  // offsets has the end, too
  std::int64_t mode;         // cpu::BagMode
  std::int64_t padding_idx;  // -1: none
};

// Each throws c10::TypeError, c10::ValueError or c10::IndexError with name, position, value and what is allowed, before
// anything is written.
void checkTable(const char* op, const at::Tensor& pool, const at::Tensor& index, std::int64_t rows,
                std::int64_t chunks);
// The next two check tensors on any device, which must be `device`; what they return may only be used where it is the
// CPU, all but its sizes and layout.
core::ChunkIndex indexOf(const char* op, const at::Tensor& index, at::Device device, std::int64_t rows,
                         std::int64_t chunks);
core::ChunkUtility utilityOf(const char* op, const at::Tensor& utility, const at::Tensor& sketch, at::Device device,
                             std::int64_t slots, std::int64_t rows, std::int64_t chunks);
// All of a batch but the values of ids and offsets.
void checkLayout(const char* op, const BagLayout& layout, at::Device device, std::int64_t rows);
// The values, too; for tensors on the CPU.
cpu::BagBatch batchOf(const char* op, const BagLayout& layout, std::int64_t rows);
void checkWeights(const char* op, const std::optional<at::Tensor>& weights, const BagLayout& layout,
                  const at::Tensor& pool);
void checkClock(const char* op, const at::Tensor& clock, double gamma);

}  // namespace torchext::kernels
