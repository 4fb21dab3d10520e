// headerOf() describes a call by its arguments (core/fault/call_header.h), for the check of calls and for errors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/fault/call_header.h"

namespace torchext {

// "sum, float32, 10 elements"; empty where a call has nothing to say.
std::string argumentsOf(const core::CallHeader& header);
// "all_reduce(sum, float32, 10 elements)", and " at train.py:31" where the line is known
std::string describe(const core::CallHeader& header);

// The headers of calls. Of `tensors` the dtype and number of elements must be the same on all ranks.
core::CallHeader headerOf(c10d::OpType type);
core::CallHeader headerOf(c10d::OpType type, const std::vector<at::Tensor>& tensors, std::int64_t root = -1);
// A reduction: the shapes count, too, but for dimensions of one.
core::CallHeader headerOf(c10d::OpType type, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op,
                          std::int64_t root = -1);
// The dtype only.
core::CallHeader headerOfDtype(c10d::OpType type, const at::Tensor& tensor);
// The last barrier of a rank that leaves (OrderlyExitScope): equal to no other call, so that nobody takes it for his
// own.
core::CallHeader headerOfOrderlyExit();
bool isOrderlyExit(const core::CallHeader& header);

}  // namespace torchext
