// SharedWindows: the windows (core/transport/shared_window.h) of a group's ranks, as one rank has them mapped.
//
// Ranks of one host that can open each other's files share memory: each has a window of its own and has mapped those
// of the others. Who that is is found out once, by open(), which is collective: every rank sends its window's address
// to the others, maps what it can, and says whether it could map all that it should. Those who could are partners;
// all of them know of each other, so that they take the same decisions about a call.
//
// Threads: open() as any collective; afterwards those of the one thread that uses the windows.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "c10d/transport/point_to_point.h"
#include "core/base/check.h"
#include "core/transport/shared_window.h"

namespace torchext {

class SharedWindows {
 public:
  // One megabyte: pieces that lie in the caches when the next one reads them, and enough of them under way.
  static constexpr int kSlots = 4;
  static constexpr std::size_t kSlotBytes = std::size_t{1} << 18U;

  // Collective over the transport's ranks; `tag` is its own. Null where this rank has no partner: no other is on its
  // host, or `enabled` is false (which need not be the same on all ranks), or the kernel refuses.
  static std::unique_ptr<SharedWindows> open(const PointToPoint& transport, int tag, bool enabled);

  // Whether all of them are partners of each other; the caller is one of them.
  bool cover(const std::vector<int>& ranks) const;
  // This rank and its partners, ascending.
  std::vector<int> partners() const;

  core::SharedWindow& own() { return *own_; }
  // A partner's.
  const core::SharedWindow& of(int rank) const { return *peers_[core::index(rank)]; }

 private:
  explicit SharedWindows(int rank, std::unique_ptr<core::SharedWindow> own) : rank_(rank), own_(std::move(own)) {}

  int rank_;
  std::unique_ptr<core::SharedWindow> own_;
  std::vector<std::unique_ptr<const core::SharedWindow>> peers_;  // by rank; null: no partner, or this rank
};

}  // namespace torchext
