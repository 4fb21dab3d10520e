#include "kfac/factors/weight_use.h"

#include <algorithm>
#include <array>
#include <memory>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace torchext {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Between a weight and the node that multiplies it stand a transposition, a cast, a view of it.
constexpr int kMostViews = 5;
constexpr std::array<std::string_view, 12> kViews{"TBackward",      "TransposeBackward", "PermuteBackward",
                                                  "ToCopyBackward", "ViewBackward",      "UnsafeViewBackward",
                                                  "SliceBackward",  "CloneBackward",     "ExpandBackward",
                                                  "AliasBackward",  "UnsqueezeBackward", "ReshapeAliasBackward"};
// Of a graph that never comes to the weight; a hook's own computation is far smaller.
constexpr std::size_t kMostNodes = 10000;

bool isView(const Node& node) {
  const std::string name = node.name();
  return std::any_of(kViews.begin(), kViews.end(), [&](std::string_view view) { return name.starts_with(view); });
}

// The only node that gradients go on to; null where there are several, or none.
const Node* onlyNext(const Node& node) {
  const Node* next = nullptr;
  for (const Edge& edge : node.next_edges()) {
    if (edge.is_valid()) {
      if (next != nullptr) {
        return nullptr;
      }
      next = edge.function.get();
    }
  }
  return next;
}

bool leadsTo(const Node* node, const Node* leaf) {
  std::array<const Node*, kMostViews> between{};
  std::size_t views = 0;
  for (; node != nullptr && node != leaf && views < between.size(); node = onlyNext(*node)) {
    between.at(views++) = node;
  }
  return node == leaf && std::all_of(between.begin(), between.begin() + static_cast<std::ptrdiff_t>(views),
                                     [](const Node* view) { return isView(*view); });
}

bool uses(const Node& node, const Node* leaf) {
  const auto& edges = node.next_edges();
  return std::any_of(edges.begin(), edges.end(),
                     [&](const Edge& edge) { return leadsTo(edge.function.get(), leaf); }) &&
         !isView(node);
}

class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(const void* owner, std::uint32_t input, std::function<void(const at::Tensor&)> see)
      : owner_(owner), input_(input), see_(std::move(see)) {}
  variable_list operator()(const variable_list& grad_inputs, const variable_list& grad_outputs) override {
    if (input_ < grad_outputs.size() && grad_outputs[input_].defined()) {
      see_(grad_outputs[input_]);
    }
    return grad_inputs;
  }
  const void* owner() const { return owner_; }

 private:
  const void* owner_;
  std::uint32_t input_;
  std::function<void(const at::Tensor&)> see_;
};

}  // namespace

std::optional<WeightUse> WeightUse::find(const at::Tensor& weight, const std::vector<at::Tensor>& outputs) {
  const auto leaf = torch::autograd::impl::grad_accumulator(weight);
  if (!leaf) {
    return std::nullopt;  // frozen
  }
  // Nodes are numbered as they are made.
  const auto earlier = [](const Edge& left, const Edge& right) {
    return left.function->sequence_nr() < right.function->sequence_nr();
  };
  std::priority_queue<Edge, std::vector<Edge>, decltype(earlier)> latest_first(earlier);
  std::unordered_set<const Node*> known;
  const auto push = [&](const Edge& edge) {
    if (edge.is_valid() && !edge.function->next_edges().empty() && known.insert(edge.function.get()).second) {
      latest_first.push(edge);
    }
  };
  for (const at::Tensor& output : outputs) {
    push(torch::autograd::impl::gradient_edge(output));
  }
  while (!latest_first.empty() && known.size() < kMostNodes) {
    const Edge edge = latest_first.top();
    latest_first.pop();
    if (uses(*edge.function, leaf.get())) {
      return WeightUse(edge.function, edge.input_nr);
    }
    for (const Edge& next : edge.function->next_edges()) {
      push(next);
    }
  }
  return std::nullopt;
}

bool WeightUse::watch(const void* owner, std::function<void(const at::Tensor& gradient)> see) const {
  for (const auto& hook : node_->post_hooks()) {
    const auto* own = dynamic_cast<const GradientHook*>(hook.get());
    if (own != nullptr && own->owner() == owner) {
      return false;
    }
  }
  // Behind the node, not in front of it: what is seen there is what the node was called with, when all hooks have run.
  node_->add_post_hook(std::make_unique<GradientHook>(owner, input_, std::move(see)));
  return true;
}

}  // namespace torchext
