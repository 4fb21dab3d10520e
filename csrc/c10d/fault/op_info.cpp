#include "c10d/fault/op_info.h"

#include <iomanip>
#include <sstream>

#include <c10/util/StringUtil.h>

#include "c10d/fault/collective_header.h"

namespace torchext {

std::string nameOf(const OpInfo& op) {
  return c10::str(op.name, op.sequence > 0 ? c10::str(" #", op.sequence) : "",
                  op.peer >= 0 ? c10::str(" with rank ", op.peer) : "");
}

std::string detailsOf(const OpInfo& op) {
  if (!op.header) {
    return "";
  }
  const auto arguments = argumentsOf(*op.header);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - op.since;
  std::ostringstream text;
  text << " (" << arguments << (arguments.empty() ? "" : "; ") << std::fixed << std::setprecision(1) << elapsed.count()
       << " s after the call)";
  return text.str();
}

std::string latenessOf(const OpInfo& op) {
  if (op.nested) {
    return c10::str("Timed out waiting ", op.limit.count(), "ms for all ranks to call it");
  }
  return op.header ? c10::str("not complete after its operation_timeout of ", op.limit.count(), "ms")
                   : c10::str("nothing came for ", op.limit.count(), " ms; is a rank stuck, or training fewer steps?");
}

}  // namespace torchext
