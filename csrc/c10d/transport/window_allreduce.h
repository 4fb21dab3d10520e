// WindowAllreduce: the sum of one buffer over ranks that share memory (shared_windows.h).
//
// The data goes in pieces of a window's slot. Of each piece every member
//   1. copies its own part into its window;
//   2. adds: of two members each adds the other's piece to its own. Of more each adds one chunk of the piece, all
//      members' parts of it, in its own window, which holds the finished chunk then;
//   3. of more than two: copies the finished chunks out of the others' windows.
// While a member waits for others to come so far with one piece it copies the next: with two pieces and more nobody is
// idle but for the slowest. A slot is used again when all who read it have said that they are done.
//
// Members end bit-equal: two add the same two numbers, and of more one member computes a chunk, the others copy it.
//
// Threads: one call at a time. Never holds the GIL. Every wait is the transport's, which names who does not come.
#pragma once

#include <array>
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

class WindowAllreduce {
 public:
  struct Buffer {
    std::byte* data;
    std::size_t count;  // elements
    const Reduction& math;
    double scale;
  };

  explicit WindowAllreduce(std::unique_ptr<SharedWindows> windows) : windows_(std::move(windows)) {}

  bool cover(const std::vector<int>& ranks) const { return windows_->cover(ranks); }
  // The number of the next piece that this rank writes: members must know it of each other before run().
  core::PieceCount nextPiece() const { return next_; }
  // In place. members: sorted, the caller's position among them. first: nextPiece() of each member as it enters.
  void run(const Buffer& buffer, const std::vector<int>& members, int position,
           const std::vector<core::PieceCount>& first, const PointToPoint& transport);

 private:
  struct Call;

  static core::Span pieceOf(const Call& call, core::PieceCount index);
  static core::Span chunkOf(const Call& call, const core::Span& piece, int place);
  void write(const Call& call, core::PieceCount index);
  void addPair(const Call& call, core::PieceCount index);
  void reduceChunk(const Call& call, core::PieceCount index);
  void collectChunks(const Call& call, core::PieceCount index);
  static void await(const Call& call, const core::SharedWindow::Counter& counter, core::PieceCount count, int rank);

  std::unique_ptr<SharedWindows> windows_;
  core::PieceCount next_ = 0;
  std::array<std::vector<int>, SharedWindows::kSlots> readers_;  // who reads what lies in a slot
};

}  // namespace torchext
