// What all ranks must agree on before a model is attached.
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

}  // namespace torchext
