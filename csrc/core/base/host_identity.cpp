#include "core/base/host_identity.h"

#include <unistd.h>

#include <array>
#include <fstream>

#include "core/base/check.h"

namespace torchext::core {
namespace {

std::string linkTarget(const char* path) {
  std::array<char, 256> target{};
  return readlink(path, target.data(), target.size() - 1) < 0 ? std::string() : std::string(target.data());
}

}  // namespace

std::string hostIdentity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return concat(boot, "|", name.data(), "|", linkTarget("/proc/self/ns/net"));
}

std::string processSpace() {
  return concat(hostIdentity(), "|", linkTarget("/proc/self/ns/pid"), "|", linkTarget("/proc/self/ns/user"), "|",
                geteuid());
}

}  // namespace torchext::core
