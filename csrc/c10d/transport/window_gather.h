// WindowGather: every rank's part to every other, or the sum of all parts, through memory that they share
// (shared_windows.h).
//
// A part goes in pieces of a window's slot: its owner copies a piece into its window and says so, the others copy it
// out of there. With parts of a few hundred kilobytes that takes tens of microseconds, where sockets take as long to
// wake anybody. For ranks that are all on one host.
//
// Who ends in the middle is named at once: by its process, or, where that lives on, by the mark that a WindowGather
// leaves behind when it goes or a call of it throws. After such a call the ranks' counts differ, and every further call
// throws. Pieces carry a stamp of their call, its number, kind and sizes: of another call nothing is read.
//
// Threads: one call at a time, the same calls with the same sizes on all ranks. Never holds the GIL. Every wait is the
// transport's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "c10d/transport/point_to_point.h"
#include "c10d/transport/reduction.h"
#include "c10d/transport/shared_windows.h"
#include "core/transport/ring_plan.h"

namespace torchext {

class WindowGather {
 public:
  struct Part {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  // windows: of the transport's ranks, all of them partners. what: the calls' name in errors.
  WindowGather(std::unique_ptr<SharedWindows> windows, PointToPoint transport, const char* what);
  ~WindowGather();
  WindowGather(const WindowGather&) = delete;
  WindowGather& operator=(const WindowGather&) = delete;

  // parts[rank]: this rank's is read, the others are written; of 0 bytes: that rank has none.
  void run(const std::vector<Part>& parts);
  // own: this rank's, of the same bytes on all ranks. Afterwards `spans` of it (elements, ascending, each rank's own
  // choice) hold the sum over ranks, the rest what it held. Terms are added in the order of ranks: the same bits
  // everywhere.
  void sum(const Part& own, const Reduction& math, const std::vector<core::Span>& spans);

 private:
  // Stands for a call: one that is left by an exception breaks this object, and says so to the other ranks.
  class Call {
   public:
    Call(WindowGather& gather, std::uint64_t stamp);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    void done() { done_ = true; }

   private:
    WindowGather& gather_;
    bool done_ = false;
  };

  const std::byte* piece(core::PieceCount index, int rank) const;
  void taken(core::PieceCount index, int rank);
  void write(const Part& own, core::PieceCount index);
  void read(const Part& part, core::PieceCount index, int rank);
  void await(const core::SharedWindow::Counter& counter, core::PieceCount count, int rank) const;

  std::unique_ptr<SharedWindows> windows_;
  PointToPoint transport_;
  const char* what_;
  std::vector<core::PieceCount> next_;  // [rank] the number of its next piece
  std::uint64_t calls_ = 0;
  std::uint64_t stamp_ = 0;  // of the call that is under way
  bool broken_ = false;
  const int process_;  // a forked child has no part in this
};

}  // namespace torchext
