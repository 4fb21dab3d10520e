#include "c10d/transport/window_gather.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

#include "core/base/mix_bits.h"

namespace torchext {
namespace {

using core::PieceCount;
using core::SharedWindow;

std::size_t offsetOf(PieceCount index) { return std::size_t{index} * SharedWindows::kSlotBytes; }

PieceCount piecesOf(const WindowGather::Part& part) {
  return static_cast<PieceCount>((part.bytes + SharedWindows::kSlotBytes - 1) / SharedWindows::kSlotBytes);
}

std::size_t bytesOf(const WindowGather::Part& part, PieceCount index) {
  return std::min(SharedWindows::kSlotBytes, part.bytes - offsetOf(index));
}

// What a rank's counter of reduced pieces says here, where nothing is reduced.
constexpr PieceCount kLeft = 1;
constexpr PieceCount kInterrupted = 2;

}  // namespace

WindowGather::WindowGather(std::unique_ptr<SharedWindows> windows, PointToPoint transport, const char* what)
    : windows_(std::move(windows)),
      transport_(std::move(transport)),
      what_(what),
      next_(core::index(transport_.size())),
      process_(getpid()) {}

WindowGather::~WindowGather() {
  if (getpid() == process_ && !broken_) {
    SharedWindow::advance(windows_->own().reduced(), kLeft);
  }
}

WindowGather::Call::Call(WindowGather& gather, std::uint64_t stamp) : gather_(gather) {
  if (gather_.broken_) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str(gather_.what_, ": an earlier exchange was interrupted, so that ranks no longer ",
                             "know what the others have sent; start the job again"));
  }
  gather_.stamp_ = core::mixBits(stamp + ++gather_.calls_);
}

WindowGather::Call::~Call() {
  if (!done_) {
    gather_.broken_ = true;
    SharedWindow::advance(gather_.windows_->own().reduced(), kInterrupted);
  }
}

// Each piece is read in the turn in which it was written, and a slot written again some turns later: nobody waits for
// one who waits for him.
void WindowGather::run(const std::vector<Part>& parts) {
  TORCH_INTERNAL_ASSERT(parts.size() == next_.size());
  PieceCount turns = 0;
  std::uint64_t sizes = 0;
  for (const Part& part : parts) {
    turns = std::max(turns, piecesOf(part));
    sizes = core::mixBits(sizes + part.bytes);
  }
  Call call(*this, sizes);
  const int self = transport_.rank();
  for (PieceCount turn = 0; turn < turns; ++turn) {
    if (turn < piecesOf(parts[core::index(self)])) {
      write(parts[core::index(self)], turn);
    }
    for (int distance = 1; distance < transport_.size(); ++distance) {
      const int rank = (self + distance) % transport_.size();
      if (turn < piecesOf(parts[core::index(rank)])) {
        read(parts[core::index(rank)], turn, rank);
      }
    }
  }
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    next_[rank] += piecesOf(parts[rank]);
  }
  call.done();
}

void WindowGather::sum(const Part& own, const Reduction& math, const std::vector<core::Span>& spans) {
  Call call(*this, ~core::mixBits(own.bytes));
  const int self = transport_.rank();
  const std::size_t width = math.element_bytes;
  // Of two terms either may come first, so that one's own stays where it is.
  const bool pair = transport_.size() == 2;
  for (PieceCount turn = 0; turn < piecesOf(own); ++turn) {
    write(own, turn);
    const std::size_t first = offsetOf(turn) / width;
    const std::size_t last = first + bytesOf(own, turn) / width;
    for (int rank = 0; rank < transport_.size(); ++rank) {
      if (pair && rank == self) {
        continue;
      }
      const std::byte* term = rank == self ? windows_->own().slot(next_[core::index(self)] + turn) : piece(turn, rank);
      for (const core::Span& span : spans) {
        const std::size_t from = std::max(first, span.begin);
        const std::size_t to = std::min(last, span.begin + span.count);
        if (from >= to) {
          continue;
        }
        std::byte* result = own.data + from * width;
        const std::byte* source = term + (from - first) * width;
        if (rank == 0 && !pair) {
          std::memcpy(result, source, (to - from) * width);
        } else {
          math.add(result, source, to - from);
        }
      }
      if (rank != self) {
        taken(turn, rank);
      }
    }
  }
  for (PieceCount& next : next_) {
    next += piecesOf(own);
  }
  call.done();
}

// Of another rank, once it is there.
const std::byte* WindowGather::piece(PieceCount index, int rank) const {
  const SharedWindow& window = windows_->of(rank);
  const PieceCount number = next_[core::index(rank)] + index;
  await(window.written(), number + 1, rank);
  if (window.stamp(number) != stamp_) {
    C10_THROW_ERROR(DistBackendError, c10::str(what_, ": ranks ", std::min(rank, transport_.rank()), " and ",
                                               std::max(rank, transport_.rank()), " make different exchanges #", calls_,
                                               "; do all ranks take the same steps, and load the same state?"));
  }
  return window.slot(number);
}

void WindowGather::taken(PieceCount index, int rank) {
  SharedWindow::advance(windows_->own().taken(rank), next_[core::index(rank)] + index + 1);
}

void WindowGather::write(const Part& own, PieceCount index) {
  SharedWindow& window = windows_->own();
  const int self = transport_.rank();
  const PieceCount piece = next_[core::index(self)] + index;
  for (int rank = 0; rank < transport_.size(); ++rank) {
    if (rank != self) {
      await(windows_->of(rank).taken(self), piece - SharedWindows::kSlots + 1, rank);
    }
  }
  std::memcpy(window.slot(piece), own.data + offsetOf(index), bytesOf(own, index));
  window.stamp(piece) = stamp_;
  SharedWindow::advance(window.written(), piece + 1);
}

void WindowGather::read(const Part& part, PieceCount index, int rank) {
  std::memcpy(part.data + offsetOf(index), piece(index, rank), bytesOf(part, index));
  taken(index, rank);
}

void WindowGather::await(const SharedWindow::Counter& counter, PieceCount count, int rank) const {
  if (SharedWindow::reached(counter, count)) {
    return;
  }
  const auto look = [&](std::chrono::milliseconds limit) {
    if (SharedWindow::await(counter, count, limit)) {
      return true;
    }
    const SharedWindow& window = windows_->of(rank);
    const bool ended = window.ownerEnded();
    if (!ended && !SharedWindow::reached(window.reduced(), kLeft)) {
      return false;
    }
    // What it wrote before it went is there.
    if (SharedWindow::reached(counter, count)) {
      return true;
    }
    const bool interrupted = SharedWindow::reached(window.reduced(), kInterrupted);
    C10_THROW_ERROR(DistBackendError, c10::str(what_, ": rank ", rank,
                                               ended         ? " died"
                                               : interrupted ? " was interrupted"
                                                             : " has left",
                                               " while rank ", transport_.rank(), " waited for it"));
  };
  transport_.waitUntil(look, rank, what_);
}

}  // namespace torchext
