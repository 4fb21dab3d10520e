// InnerGroups holds the groups that a backend of ours stands on, and knows which of them carries what.
//
// Threads: everything from any thread. Who uses a group owns it meanwhile: take() lets go of groups that other threads
// still have copies of.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/fault/closed_in_children.h"
#include "c10d/fault/group_health.h"

namespace torchext {

// All of the same ranks in the same order. Built in Python, as the wheel of torch ships no headers of Gloo.
struct InnerBackends {
  c10::intrusive_ptr<c10d::Backend> cpu;                // Gloo; never null
  c10::intrusive_ptr<c10d::Backend> cuda;               // NCCL; null when torch has no CUDA or no GPU is visible
  c10::intrusive_ptr<c10d::Backend> control;            // Gloo of its own: liveness, generator; null in a group of one
  std::shared_ptr<ClosedInChildren> sockets = nullptr;  // of the Gloo groups
};

class InnerGroups {
 public:
  // health: of the outer group, for messages.
  InnerGroups(InnerBackends groups, std::shared_ptr<GroupHealth> health)
      : groups_(std::move(groups)), health_(std::move(health)) {}

  InnerBackends all() const;
  // The one that carries tensors of this device. Throws for a device without one, naming the way out, and after take().
  c10::intrusive_ptr<c10d::Backend> of(c10::DeviceType device) const;
  // Those that carry the user's tensors.
  std::vector<c10::intrusive_ptr<c10d::Backend>> carriers() const;

  // A group of some ranks of each; without a control group on a rank that is not among them. Collective.
  InnerBackends split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                      const c10d::Backend::Options& options) const;

  // Ends what is stuck inside Gloo and NCCL, here and at the peers.
  void closeConnections() noexcept;
  // Lets go of all of them, or of all but NCCL's.
  enum class Taken : std::uint8_t { kGloo, kAll };
  std::unique_ptr<InnerBackends> take(Taken which);
  // In a forked child: forgets them. Their threads exist only in the parent.
  void abandon() noexcept;

 private:
  mutable std::mutex mutex_;
  InnerBackends groups_;  // guarded by mutex_
  const std::shared_ptr<GroupHealth> health_;
};

}  // namespace torchext
