#include "c10d/transport/hosts_of.h"

#include <algorithm>
#include <cstdint>

#include "core/base/host_identity.h"

namespace torchext {

std::vector<int> hostsOf(const AgreementGroup& group, c10::Device device) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kLong).device(device);
  at::Tensor all = at::empty({group.size, 1}, options);
  group.gather(at::full({1}, agreementHash(core::hostIdentity()), options), all);
  all = all.cpu();
  std::vector<int> host_of;
  std::vector<std::int64_t> hosts;
  for (std::int64_t rank = 0; rank < group.size; ++rank) {
    const auto host = all.const_data_ptr<std::int64_t>()[rank];
    const auto known = std::find(hosts.begin(), hosts.end(), host);
    host_of.push_back(static_cast<int>(known - hosts.begin()));
    if (known == hosts.end()) {
      hosts.push_back(host);
    }
  }
  return host_of;
}

}  // namespace torchext
