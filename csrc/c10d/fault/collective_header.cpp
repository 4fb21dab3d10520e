#include "c10d/fault/collective_header.h"

#include <array>
#include <cstdint>

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include "c10d/fault/group_progress.h"

namespace torchext {
namespace {

constexpr std::int32_t kOrderlyExit = -2;  // in place of a root

}  // namespace

std::string argumentsOf(const core::CallHeader& header) {
  using c10d::ReduceOp;
  static constexpr std::array<const char*, ReduceOp::UNUSED> kReductions{"sum",  "avg", "product", "min",       "max",
                                                                         "band", "bor", "bxor",    "premul_sum"};
  std::vector<std::string> parts;
  if (header.reduce_op < ReduceOp::UNUSED) {
    parts.emplace_back(kReductions.at(header.reduce_op));
  }
  if (header.dtype >= 0 && header.dtype < static_cast<int>(c10::ScalarType::NumOptions)) {
    parts.emplace_back(c10::getDtypeNames(static_cast<c10::ScalarType>(header.dtype)).first);
  }
  if (header.numel >= 0) {
    parts.push_back(c10::str(header.numel, header.numel == 1 ? " element" : " elements"));
  }
  if (header.root >= 0) {
    parts.push_back(c10::str("root ", header.root));
  }
  return c10::Join(", ", parts);
}

std::string describe(const core::CallHeader& header) {
  const auto line = core::textOf(header.line);
  return c10::str(opName(static_cast<c10d::OpType>(header.kind)), "(", argumentsOf(header), ")",
                  line.empty() ? "" : " at ", line);
}

core::CallHeader headerOf(c10d::OpType type) {
  core::CallHeader header;
  header.kind = static_cast<std::uint8_t>(type);
  header.reduce_op = c10d::ReduceOp::UNUSED;
  return header;
}

core::CallHeader headerOfOrderlyExit() {
  auto header = headerOf(c10d::OpType::BARRIER);
  header.root = kOrderlyExit;
  return header;
}

bool isOrderlyExit(const core::CallHeader& header) { return header.root == kOrderlyExit; }

core::CallHeader headerOfDtype(c10d::OpType type, const at::Tensor& tensor) {
  auto header = headerOf(type);
  header.dtype = static_cast<std::int16_t>(tensor.scalar_type());
  return header;
}

core::CallHeader headerOf(c10d::OpType type, const std::vector<at::Tensor>& tensors, std::int64_t root) {
  auto header = headerOf(type);
  header.root = static_cast<std::int32_t>(root);
  header.numel = 0;
  for (const auto& tensor : tensors) {
    header.numel += tensor.numel();
    if (header.dtype >= 0 && header.dtype != static_cast<std::int16_t>(tensor.scalar_type())) {
      header.shapes = core::mixHash(header.shapes, static_cast<std::uint64_t>(tensor.scalar_type()));
    } else {
      header.dtype = static_cast<std::int16_t>(tensor.scalar_type());
    }
  }
  return header;
}

core::CallHeader headerOf(c10d::OpType type, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op,
                          std::int64_t root) {
  auto header = headerOf(type, tensors, root);
  header.reduce_op = static_cast<std::uint8_t>(op.op_);
  for (const auto& tensor : tensors) {
    for (const std::int64_t extent : tensor.sizes()) {
      if (extent != 1) {
        header.shapes = core::mixHash(header.shapes, static_cast<std::uint64_t>(extent));
      }
    }
    if (tensors.size() > 1) {
      header.shapes = core::mixHash(header.shapes, ~0ULL);  // between two tensors
    }
  }
  return header;
}

}  // namespace torchext
