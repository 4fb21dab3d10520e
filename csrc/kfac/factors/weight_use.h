// WeightUse: the node of the autograd graph in which a module's call used its weight.
//
// A hook on the module's output sees what other hooks have made of that output, and a hook on a tensor runs before
// those that come later. The node that multiplies the weight has neither trouble: the gradient which it is called with
// is what the weight's own gradient is made of, whatever hooks have changed before. So the graph is searched for that
// node, from what the module's call returned, the latest node first. In the usual call it is the first one looked at.
//
// Threads: find() on the thread of the forward pass; what watch() is given runs in autograd's, without the interpreter
// lock. Ownership: the hook belongs to the node, and ends with the graph.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace torchext {

class WeightUse {
 public:
  // The latest use of `weight` that any of the outputs was made of; none where no gradient of theirs reaches it.
  static std::optional<WeightUse> find(const at::Tensor& weight, const std::vector<at::Tensor>& outputs);

  // Of what the node returned in the forward pass, as an operator's own output: sizes may be those of a flattened view.
  const torch::autograd::InputMetadata& output() const { return node_->input_metadata(input_); }
  // Has `see` called with the gradient at that output, as the node gets it, in every backward pass through the node.
  // owner: false, and nothing happens, where the same one watches this node already.
  bool watch(const void* owner, std::function<void(const at::Tensor& gradient)> see) const;

 private:
  // Of the kind that this torch has.
  using NodePtr = decltype(torch::autograd::Edge::function);
  WeightUse(NodePtr node, std::uint32_t input) : node_(std::move(node)), input_(input) {}

  NodePtr node_;
  std::uint32_t input_;  // of the backward node
};

}  // namespace torchext
