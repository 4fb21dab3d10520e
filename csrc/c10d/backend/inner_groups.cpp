#include "c10d/backend/inner_groups.h"

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/backend/torch_compat.h"

namespace torchext {
namespace {

// A tag of the data group on which nobody sends: see closeConnections().
constexpr int kClosingTag = 0x7fffffff;

}  // namespace

InnerBackends InnerGroups::all() const {
  const std::lock_guard lock(mutex_);
  return groups_;
}

c10::intrusive_ptr<c10d::Backend> InnerGroups::of(c10::DeviceType device) const {
  InnerBackends groups = all();
  if (device == c10::DeviceType::CPU) {
    if (!groups.cpu) {
      std::rethrow_exception(health_->failureOf({.name = "a call"}));
    }
    return groups.cpu;
  }
  if (device == c10::DeviceType::CUDA) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        groups.cuda, health_->label(),
        ": a CUDA tensor was given, but this group has no NCCL inner backend, because no GPU was "
        "visible to torch when the group was created; move the tensor to the CPU, or make a GPU "
        "visible before init_process_group()");
    return groups.cuda;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, health_->label(), ": tensors on ", c10::DeviceTypeName(device, true),
                              " are not carried; this backend takes cpu and cuda tensors");
}

std::vector<c10::intrusive_ptr<c10d::Backend>> InnerGroups::carriers() const {
  const InnerBackends groups = all();
  std::vector<c10::intrusive_ptr<c10d::Backend>> carriers;
  for (const auto& group : {groups.cpu, groups.cuda}) {
    if (group) {
      carriers.push_back(group);
    }
  }
  return carriers;
}

InnerBackends InnerGroups::split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                 const c10d::Backend::Options& options) const {
  const auto split_one = [&](const c10::intrusive_ptr<c10d::Backend>& group, const char* prefix) {
    auto inner_options = cloneOptions(group->getBackendOptions());
    inner_options->timeout = options.timeout;
    inner_options->group_name = options.group_name;
    inner_options->global_ranks_in_group = options.global_ranks_in_group;
    return group->split(c10::make_intrusive<c10d::PrefixStore>(prefix, store), ranks, inner_options);
  };
  const auto cpu = of(c10::DeviceType::CPU);
  const InnerBackends own = all();
  InnerBackends children;
  children.sockets = own.sockets;  // Gloo's device, with its event loop, is the parent's
  children.cpu = split_one(cpu, "cpu");
  if (own.cuda) {
    children.cuda = split_one(own.cuda, "cuda");
  }
  // Not of own.cpu: Gloo of torch 2.11 mostly hangs when one of its groups is split a second time.
  const bool member = std::find(ranks.begin(), ranks.end(), health_->identity().rank()) != ranks.end();
  if (member && ranks.size() > 1) {
    children.control = split_one(own.control ? own.control : own.cpu, "control");
  }
  return children;
}

// A Gloo wait that times out closes every connection of its group. That is the one way to end what is stuck inside
// Gloo: wait one millisecond for a message that nobody sends.
void InnerGroups::closeConnections() noexcept {
  const InnerBackends groups = all();
  for (int peer = 0; peer < groups.cpu->getSize(); ++peer) {
    if (peer == groups.cpu->getRank()) {
      continue;
    }
    try {
      std::vector<at::Tensor> tensors{at::empty({1}, at::kByte)};
      auto work = groups.cpu->recv(tensors, peer, kClosingTag);
      work->wait(std::chrono::milliseconds(1));
    } catch (const std::exception& error) {
      // Either this peer's connection was closed already, and the next one is tried, or the wait did its work.
      if (std::string_view(error.what()).find("Timed out") != std::string_view::npos) {
        break;
      }
    }
  }
  try {
    if (groups.cuda) {
      groups.cuda->abort();
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << health_->label() << ": abort of the CUDA backend failed: " << error.what();
  }
}

std::unique_ptr<InnerBackends> InnerGroups::take(Taken which) {
  auto taken = std::make_unique<InnerBackends>();
  const std::lock_guard lock(mutex_);
  std::swap(*taken, groups_);
  if (which == Taken::kGloo) {
    std::swap(taken->cuda, groups_.cuda);
  }
  return taken;
}

void InnerGroups::abandon() noexcept {
  groups_.cpu.release();
  groups_.cuda.release();
  groups_.control.release();
}

}  // namespace torchext
