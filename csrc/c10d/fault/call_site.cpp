#include "c10d/fault/call_site.h"

#include <atomic>

namespace torchext {
namespace {
std::atomic<core::CallLine (*)()> line_finder{nullptr};
}  // namespace

void setLineFinder(core::CallLine (*finder)()) noexcept { line_finder.store(finder); }

core::CallLine callSite() {
  auto* finder = line_finder.load();
  return finder == nullptr ? core::CallLine{} : finder();
}

}  // namespace torchext
