#include "c10d/transport/window_allreduce.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "c10d/fault/fault_points.h"

namespace torchext {
namespace {

constexpr const char* kWindowOperation = "partial_all_reduce";
}  // namespace

struct WindowAllreduce::Call {
  const Buffer& buffer;
  const std::vector<int>& members;
  int position;
  const std::vector<core::PieceCount>& first;
  const PointToPoint& transport;
  std::size_t piece_elements;  // of every piece but the last

  int size() const { return static_cast<int>(members.size()); }
  std::byte* at(std::size_t element) const { return buffer.data + element * buffer.math.element_bytes; }
  std::size_t bytes(std::size_t elements) const { return elements * buffer.math.element_bytes; }
};

void WindowAllreduce::run(const Buffer& buffer, const std::vector<int>& members, int position,
                          const std::vector<core::PieceCount>& first, const PointToPoint& transport) {
  const Call call{buffer, members, position, first, transport, SharedWindows::kSlotBytes / buffer.math.element_bytes};
  const auto pieces = static_cast<core::PieceCount>((buffer.count + call.piece_elements - 1) / call.piece_elements);
  // Stage s of piece p runs in turn p + s: what a turn waits for was written by the others a turn ago.
  for (core::PieceCount turn = 0; turn < pieces + 2; ++turn) {
    if (turn < pieces) {
      write(call, turn);
      faultPoint(FaultPoint::kWindowWritten);
    }
    if (call.size() == 2) {
      if (turn >= 1 && turn - 1 < pieces) {
        addPair(call, turn - 1);
      }
      continue;
    }
    if (turn >= 1 && turn - 1 < pieces) {
      reduceChunk(call, turn - 1);
    }
    if (turn >= 2) {
      collectChunks(call, turn - 2);
    }
  }
  next_ += pieces;
}

core::Span WindowAllreduce::pieceOf(const Call& call, core::PieceCount index) {
  const std::size_t begin = index * call.piece_elements;
  return {begin, std::min(call.piece_elements, call.buffer.count - begin)};
}

// What a ring would make of the piece: whole lines, so that no two members write to one.
core::Span WindowAllreduce::chunkOf(const Call& call, const core::Span& piece, int place) {
  return core::RingPlan(piece.count, call.buffer.math.element_bytes, call.size(), SharedWindows::kSlotBytes)
      .chunk(place);
}

void WindowAllreduce::await(const Call& call, const core::SharedWindow::Counter& counter, core::PieceCount count,
                            int rank) {
  if (core::SharedWindow::reached(counter, count)) {
    return;
  }
  call.transport.waitUntil(
      [&](std::chrono::milliseconds limit) { return core::SharedWindow::await(counter, count, limit); }, rank,
      kWindowOperation);
}

void WindowAllreduce::write(const Call& call, core::PieceCount index) {
  core::SharedWindow& own = windows_->own();
  const core::PieceCount piece = next_ + index;
  auto& readers = readers_[piece % SharedWindows::kSlots];
  const int self = call.members[core::index(call.position)];
  for (const int reader : readers) {
    await(call, windows_->of(reader).taken(self), piece - SharedWindows::kSlots + 1, reader);
  }
  readers.clear();
  std::copy_if(call.members.begin(), call.members.end(), std::back_inserter(readers),
               [self](int member) { return member != self; });
  const core::Span span = pieceOf(call, index);
  std::memcpy(own.slot(piece), call.at(span.begin), call.bytes(span.count));
  core::SharedWindow::advance(own.written(), piece + 1);
}

void WindowAllreduce::addPair(const Call& call, core::PieceCount index) {
  const int place = 1 - call.position;
  const int peer = call.members[core::index(place)];
  const core::SharedWindow& window = windows_->of(peer);
  const core::PieceCount piece = call.first[core::index(place)] + index;
  await(call, window.written(), piece + 1, peer);
  const core::Span span = pieceOf(call, index);
  call.buffer.math.add_scaled(call.at(span.begin), window.slot(piece), span.count, call.buffer.scale);
  core::SharedWindow::advance(windows_->own().taken(peer), piece + 1);
}

// Of members in the order of the ring from the caller on: only one computes a chunk, so any order will do.
void WindowAllreduce::reduceChunk(const Call& call, core::PieceCount index) {
  core::SharedWindow& own = windows_->own();
  const core::PieceCount own_piece = next_ + index;
  const core::Span span = pieceOf(call, index);
  const core::Span chunk = chunkOf(call, span, call.position);
  std::byte* sum = own.slot(own_piece) + call.bytes(chunk.begin);
  for (int step = 1; step < call.size(); ++step) {
    const int place = (call.position + step) % call.size();
    const int peer = call.members[core::index(place)];
    const core::SharedWindow& window = windows_->of(peer);
    const core::PieceCount piece = call.first[core::index(place)] + index;
    await(call, window.written(), piece + 1, peer);
    const std::byte* term = window.slot(piece) + call.bytes(chunk.begin);
    if (step + 1 < call.size()) {
      call.buffer.math.add(sum, term, chunk.count);
    } else {
      call.buffer.math.add_scaled(sum, term, chunk.count, call.buffer.scale);
    }
  }
  core::SharedWindow::advance(own.reduced(), own_piece + 1);
  std::memcpy(call.at(span.begin + chunk.begin), sum, call.bytes(chunk.count));
}

void WindowAllreduce::collectChunks(const Call& call, core::PieceCount index) {
  const core::Span span = pieceOf(call, index);
  for (int step = 1; step < call.size(); ++step) {
    const int place = (call.position + step) % call.size();
    const int peer = call.members[core::index(place)];
    const core::SharedWindow& window = windows_->of(peer);
    const core::PieceCount piece = call.first[core::index(place)] + index;
    await(call, window.reduced(), piece + 1, peer);
    const core::Span chunk = chunkOf(call, span, place);
    std::memcpy(call.at(span.begin + chunk.begin), window.slot(piece) + call.bytes(chunk.begin),
                call.bytes(chunk.count));
    core::SharedWindow::advance(windows_->own().taken(peer), piece + 1);
  }
}

}  // namespace torchext
