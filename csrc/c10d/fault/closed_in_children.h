// ClosedInChildren: closes the sockets of an inner group in the processes that this one forks.
//
// Why
//   A forked child (a DataLoader's worker) gets a copy of every descriptor. While one lives, the connections of a
//   parent that is killed stay open, and no peer notices its end. So a child closes its copies first thing after the
//   fork. It shuts nothing down: that would end the parent's connections, too.
//
// How
//   Gloo tells nobody its descriptors. But its event loop is an epoll instance, and the kernel lists what that watches
//   (/proc/self/fdinfo). An object of this class notes the instances that come to be between its construction and
//   watch(), in which the group is made. The child reads the list at the fork, and so knows connections that were made
//   later. An instance counts as Gloo's if it stores pointers with its descriptors; Python and libuv store the
//   descriptor itself. A socket's inode tells whether a number still means what it meant.
//   A program that is executed gets none of them either: watch() sets FD_CLOEXEC.
//
// Limits: connections that are made later (TORCH_GLOO_LAZY_INIT) have no FD_CLOEXEC. Where /proc is missing nothing is
// closed, and the heartbeat alone finds such a death.
//
// Threads: construction and watch() on the thread that makes the group; a fork may come from any, at any time.
#pragma once

#include <sys/types.h>

#include <optional>
#include <vector>

namespace torchext {

class ClosedInChildren {
 public:
  struct Watched {
    int descriptor;
    ino_t inode;
    bool operator==(const Watched&) const = default;
  };
  struct EventLoop {
    int descriptor;
    std::vector<Watched> sockets;  // at watch()
  };

  ClosedInChildren();
  ~ClosedInChildren();
  ClosedInChildren(const ClosedInChildren&) = delete;
  ClosedInChildren& operator=(const ClosedInChildren&) = delete;

  // From now on children close what the event loops watch that have come to be since construction.
  void watch();

 private:
  std::optional<std::vector<int>> before_;  // event loops at construction; nothing: they could not be listed
};

}  // namespace torchext
