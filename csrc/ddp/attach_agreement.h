// What all ranks must agree on before a model is attached, checked in one all-gather.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/attachable_backend.h"

namespace torchext {

// What a synchronizer adds to the tensors: the name for the message, and a value that must be the same on all ranks.
using AgreementFields = std::vector<std::pair<std::string, std::int64_t>>;
// A text as such a value.
std::int64_t agreementHash(const std::string& text);

// Collective. Compares tensors (count, sizes, dtypes) and `fields` between ranks; throws c10::DistBackendError on every
// rank, naming the field, the first rank that differs from rank 0, and both values. Returns host_of: a dense host index
// for each rank, from what the ranks themselves report (machine and network namespace), not from a user's variable.
std::vector<int> agreeOnAttach(AttachableBackend& group, const std::vector<at::Tensor>& parameters,
                               const std::vector<at::Tensor>& buffers, const AgreementFields& fields);

}  // namespace torchext
