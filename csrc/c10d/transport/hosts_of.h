// hostsOf() says which ranks of a group share a host.
#pragma once

#include <vector>

#include "c10d/transport/agreement.h"

namespace torchext {

// Collective. A dense host index for each rank, from what the ranks themselves report (machine and network namespace),
// not from a user's variable. device: of the tensors that the group's collectives take.
std::vector<int> hostsOf(const AgreementGroup& group, c10::Device device = c10::kCPU);

}  // namespace torchext
