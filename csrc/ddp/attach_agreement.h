// What all ranks must agree on before a model is attached, checked in one all-gather.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/process_group_prague.h"

namespace torchext {

// Collective. Compares tensors (count, sizes, dtypes) and options between ranks; throws c10::DistBackendError on every
// rank, naming the field, the first rank that differs from rank 0, and both values. Returns host_of: a dense host index
// for each rank, from what the ranks themselves report (machine and network namespace), not from a user's variable.
std::vector<int> agreeOnAttach(ProcessGroupPrague& group, const std::vector<at::Tensor>& parameters,
                               const std::vector<at::Tensor>& buffers, std::size_t bucket_bytes);

}  // namespace torchext
