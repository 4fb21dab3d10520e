// agreeOnAttach() compares what all ranks must have alike before a model is attached. Ranks learn of each other there.
#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "c10d/transport/agreement.h"

namespace torchext {

// Tensors that must be alike on all ranks: shapes, dtypes, and the order of dimensions in memory, over which averages
// go. names: of each, for the message; may be empty.
AgreementField agreementOf(std::string what, const std::vector<at::Tensor>& tensors,
                           const std::vector<std::string>& names = {});

// Collective: agree() for torchext.attach.
void agreeOnAttach(AttachableBackend& group, const AgreementFields& fields);

// Collective. A dense host index for each rank, from what the ranks themselves report (machine and network namespace),
// not from a user's variable.
std::vector<int> hostsOf(AttachableBackend& group);

}  // namespace torchext
