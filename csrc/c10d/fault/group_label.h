// GroupLabel names one rank of a group in messages, and knows the process that made it.
//
// Threads: everything from any thread.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <string>

#include "c10d/fault/op_info.h"

namespace torchext {

class GroupLabel {
 public:
  GroupLabel(std::string backend_name, int rank, int size);

  int rank() const noexcept { return rank_; }
  const std::string& backendName() const noexcept { return backendName_; }
  void setGroupName(const std::string& name);

  // "prague [rank 2 of 4, group default]"
  std::string text() const;
  // text() and the call: "prague [...]: all_reduce #17 (sum, float32, 10 elements; 0.4 s after the call)"
  std::string describe(const OpInfo& op) const;

  // Whether this process is a fork of the one that made the group.
  bool inForkedChild() const noexcept;
  // Throws DistBackendError in a forked child.
  void checkProcess(const char* op) const;

 private:
  const std::string backendName_;
  const int rank_;
  const int size_;
  const pid_t creator_;
  mutable std::mutex mutex_;
  std::string groupName_;  // guarded by mutex_
};

}  // namespace torchext
