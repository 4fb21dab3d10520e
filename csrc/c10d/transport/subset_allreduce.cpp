#include "c10d/transport/subset_allreduce.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include "c10d/fault/fault_points.h"
#include "c10d/fault/parse_message.h"
#include "core/transport/ring_plan.h"

namespace torchext {
namespace {

// One tag for each kind of message: they match in the order posted, and the ring posts its kinds out of order.
enum SubsetTag { kFrame = 0, kReduceScatter = 1, kAllGather = 2 };

constexpr const char* kOperation = "partial_all_reduce";
constexpr std::size_t kHeaderBytes = sizeof(core::SubsetHeader);

std::string describe(const core::SubsetHeader& header) {
  return c10::str(header.numel, " elements of ", c10::toString(static_cast<c10::ScalarType>(header.dtype)),
                  " scaled by ", header.scale, " in call ", header.call_id);
}

[[noreturn]] void throwMismatch(const core::SubsetHeader& own, const core::SubsetHeader& other) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str("partial_all_reduce: rank ", own.rank, " passed ", describe(own), ", rank ", other.rank, " passed ",
               describe(other),
               "; members, dtype, number of elements and the order of calls must agree on all members. No buffer was "
               "changed."));
}

// Segments of one chunk are equally long: a short one at the end would cost a message and hide nothing. At least two,
// so that one travels while the other is added, unless they would be tiny.
std::size_t segmentBytes(std::size_t bytes, std::size_t size, const TransferTuning& tuning) {
  constexpr std::size_t kLine = 64;  // what core::RingPlan aligns to
  const auto parts = [](std::size_t whole, std::size_t part) { return (whole + part - 1) / part; };
  const std::size_t chunk_lines = parts(parts(bytes, kLine), size);
  const std::size_t most = size == 2 ? tuning.segment_bytes_of_pair : tuning.segment_bytes;
  const std::size_t segments =
      std::max({parts(chunk_lines * kLine, most),
                std::min<std::size_t>(2, chunk_lines * kLine / tuning.least_segment_bytes), std::size_t{1}});
  return parts(chunk_lines, segments) * kLine;
}

}  // namespace

struct SubsetAllreduce::Call {
  std::byte* data;
  std::size_t count;
  const Reduction& math;
  c10::ScalarType dtype;
  const std::vector<int>& members;
  int position;  // of the caller among the members
  std::uint64_t id;
  double scale;
  std::vector<std::pair<PointToPoint::WorkPtr, int>> sends = {};  // under way, with their destinations
  std::vector<core::PieceCount> first_pieces = {};                // by position, from the headers

  std::size_t bytes() const { return count * math.element_bytes; }
  std::byte* at(const core::Span& span) const { return data + span.begin * math.element_bytes; }
  std::size_t bytesOf(const core::Span& span) const { return span.count * math.element_bytes; }
  int size() const { return static_cast<int>(members.size()); }
  std::size_t place(int position) const { return static_cast<std::size_t>((position + size()) % size()); }
  int member(int position) const { return members[place(position)]; }
};

SubsetAllreduce::SubsetAllreduce(PointToPoint transport, int tag_base, std::unique_ptr<SharedWindows> windows,
                                 TransferTuning tuning)
    : transport_(std::move(transport)),
      tag_base_(tag_base),
      tuning_(tuning),
      windows_(windows ? std::make_unique<WindowAllreduce>(std::move(windows)) : nullptr) {}

// Not a vector: that would write to every byte, and most of a frame's slot is never used.
std::byte* SubsetAllreduce::scratch(std::size_t bytes) {
  if (scratch_bytes_ < bytes) {
    scratch_.reset();
    scratch_.reset(new std::byte[bytes]);
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

void SubsetAllreduce::send(Call& call, const void* data, std::size_t bytes, int destination, int tag) {
  bytes_sent_ += bytes;
  call.sends.emplace_back(transport_.send(data, bytes, destination, tag_base_ + tag), destination);
}

void SubsetAllreduce::finishSends(Call& call) {
  for (const auto& [work, destination] : call.sends) {
    transport_.wait(work, destination, kOperation);
  }
  call.sends.clear();
}

core::SubsetHeader SubsetAllreduce::headerOf(const Call& call) const {
  core::SubsetHeader header;
  header.dtype = static_cast<std::int16_t>(call.dtype);
  header.rank = transport_.rank();
  header.call_id = call.id;
  header.members_hash = core::hashMembers(call.members);
  header.scale = static_cast<float>(call.scale);
  header.numel = static_cast<std::int64_t>(call.count);
  header.first_piece = windows_ ? windows_->nextPiece() : 0;
  return header;
}

void SubsetAllreduce::run(const at::Tensor& buffer, const std::vector<int>& members, std::uint64_t call_id,
                          double scale) {
  const Reduction& math = reductionFor(buffer.scalar_type());
  const auto self = std::lower_bound(members.begin(), members.end(), transport_.rank());
  TORCH_INTERNAL_ASSERT(buffer.is_contiguous() && buffer.device().is_cpu());
  TORCH_INTERNAL_ASSERT(self != members.end() && *self == transport_.rank());
  Call call{static_cast<std::byte*>(buffer.data_ptr()),
            static_cast<std::size_t>(buffer.numel()),
            math,
            buffer.scalar_type(),
            members,
            static_cast<int>(self - members.begin()),
            call_id,
            scale};
  if (members.size() == 1) {
    if (scale != 1.0) {
      math.multiply(call.data, call.count, scale);
    }
  } else if (windows_ && call.bytes() * (members.size() - 1) >= tuning_.least_shared_bytes &&
             windows_->cover(members)) {
    shared(call);
  } else if (call.bytes() <= tuning_.frame_bytes &&
             (members.size() == 2 || call.bytes() * (members.size() - 1) <= tuning_.direct_total_bytes)) {
    direct(call);
  } else {
    ring(call);
  }
}

// Every pair of members exchanges exactly one frame in every call, whatever its algorithm, and a receive is as long as
// the longest frame: members that disagree find out from a header, and no message is left over.
std::byte* SubsetAllreduce::exchangeFrames(Call& call, const void* payload, std::size_t payload_bytes, To to,
                                           std::size_t more_scratch) {
  const int others = call.size() - 1;
  std::byte* memory = scratch(slotBytes() * static_cast<std::size_t>(call.size()) + more_scratch);
  std::byte* frame = memory + slotBytes() * static_cast<std::size_t>(others);
  const core::SubsetHeader own = headerOf(call);
  std::memcpy(frame, &own, kHeaderBytes);
  // Not memcpy: an empty tensor has no address.
  std::copy_n(static_cast<const std::byte*>(payload), payload_bytes, frame + kHeaderBytes);
  std::vector<PointToPoint::WorkPtr> receives;
  receives.reserve(static_cast<std::size_t>(others));
  const auto post_receives = [&] {
    for (int i = 0; i < others; ++i) {
      std::byte* slot = memory + slotBytes() * static_cast<std::size_t>(i);
      // Gloo accepts a message that is too short: a header must not be completed by what the slot held before.
      std::memset(slot, 0, kHeaderBytes);
      // From the previous member first, to the next first: no member is everybody's first target.
      receives.push_back(transport_.recv(slot, slotBytes(), call.member(call.position - 1 - i), tag_base_ + kFrame));
    }
  };
  // Sends first. A send that finds its receive posted is written by this thread, under the lock of the connection;
  // whatever arrives on it meanwhile makes Gloo's thread spin for that lock, at worst for the slice of a core that this
  // thread needs to go on. One that comes first is written by Gloo's thread, which cannot meet itself.
  // On a line the word that a receive is posted would stand behind the frame that goes the same way: receives first.
  const bool receives_first = onLine();
  if (receives_first) {
    post_receives();
  }
  for (int i = 0; i < others; ++i) {
    const bool with_payload = to == To::kAll || (to == To::kNext && i == 0);
    send(call, frame, kHeaderBytes + (with_payload ? payload_bytes : 0), call.member(call.position + 1 + i), kFrame);
  }
  if (!receives_first) {
    post_receives();
  }
  const auto start = std::chrono::steady_clock::now();
  std::optional<core::SubsetHeader> differing;
  call.first_pieces.resize(call.members.size(), own.first_piece);
  {
    RECORD_FUNCTION("torchext::wait_peers", std::vector<c10::IValue>{});
    for (int i = 0; i < others; ++i) {
      const int source = call.member(call.position - 1 - i);
      transport_.wait(receives[static_cast<std::size_t>(i)], source, kOperation);
      const std::span<const std::byte> received(memory + slotBytes() * static_cast<std::size_t>(i), kHeaderBytes);
      const auto header = parseOrRefuse([&](const char* error) { return transport_.refuse(source, kOperation, error); },
                                        core::parseSubsetHeader, received, source);
      if (!own.sameCall(header)) {
        differing = header;
      }
      call.first_pieces[call.place(call.position - 1 - i)] = header.first_piece;
    }
  }
  peer_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  faultPoint(FaultPoint::kSubsetHeaders);
  if (differing) {
    finishSends(call);
    throwMismatch(own, *differing);
  }
  return memory;
}

void SubsetAllreduce::shared(Call& call) {
  exchangeFrames(call, nullptr, 0, To::kNobody, 0);
  finishSends(call);
  RECORD_FUNCTION("torchext::move_bytes", std::vector<c10::IValue>{});
  windows_->run({call.data, call.count, call.math, call.scale}, call.members, call.position, call.first_pieces,
                transport_);
  bytes_shared_ += call.bytes();
}

void SubsetAllreduce::direct(Call& call) {
  std::byte* memory = exchangeFrames(call, call.data, call.bytes(), To::kAll, 0);
  // In member order on every member: floating-point addition does not associate, and members must end bit-equal.
  // It commutes, though: the second member adds the first's to its own and needs no copy.
  // Slot i has the frame of the member i + 1 places before this one, the last slot the own frame.
  const auto payload = [&](int position) {
    const int i = (call.position - 1 - position + 2 * call.size()) % call.size();
    return memory + slotBytes() * static_cast<std::size_t>(i) + kHeaderBytes;
  };
  if (call.position > 1) {
    std::copy_n(payload(0), call.bytes(), call.data);
  }
  for (int position = 1; position < call.size(); ++position) {
    const std::byte* term = payload(call.position == 1 && position == 1 ? 0 : position);
    if (position + 1 < call.size()) {
      call.math.add(call.data, term, call.count);
    } else {
      call.math.add_scaled(call.data, term, call.count, call.scale);
    }
  }
  finishSends(call);
}

// Reduce-scatter then all-gather around the ring of members (core::RingPlan). A chunk travels in segments; a segment is
// passed on as soon as it is added, so steps overlap. The first segment of all comes with the frame. The receives of
// the all-gather go straight into the buffer: a final segment cannot arrive before this member's own partial one has
// been used downstream.
//
// On a line the reduce-scatter goes first: finished segments that overtake partial ones leave the line idle at the end,
// where the last partial ones must cross it, and then what they become. Elsewhere they are passed on while they are in
// the cache. Each member decides for itself: it is a matter of when it posts its receives.
void SubsetAllreduce::ring(Call& call) {
  const int g = call.size();
  const std::size_t segment_bytes = segmentBytes(call.bytes(), static_cast<std::size_t>(g), tuning_);
  const core::RingPlan plan(call.count, call.math.element_bytes, g, segment_bytes);
  const int next = call.member(call.position + 1);
  const int previous = call.member(call.position - 1);

  // What arrives from `previous`, in order; what arrives is what is sent on, but for the last of the all-gather.
  std::vector<core::Span> reduced;
  std::vector<core::Span> gathered;
  std::size_t forwarded = 0;     // of `gathered`: all but the last step's
  std::size_t last_reduced = 0;  // from here on `reduced` holds finished sums
  for (int step = 0; step < plan.steps(); ++step) {
    auto& list = plan.reduces(step) ? reduced : gathered;
    if (step == g - 2) {
      last_reduced = reduced.size();
    }
    if (step == plan.steps() - 1) {
      forwarded = gathered.size();
    }
    const int chunk = plan.receiveChunk(call.position, step);
    for (int i = 0; i < plan.segments(chunk); ++i) {
      list.push_back(plan.segment(chunk, i));
    }
  }

  const bool line = onLine();
  const std::size_t window = std::max<std::size_t>(2, line ? tuning_.segments_ahead_of_line : tuning_.segments_ahead);
  const std::size_t segment_slot = plan.largestSegment() * call.math.element_bytes;
  const int own = plan.sendChunk(call.position, 0);
  const core::Span first = plan.segments(own) > 0 ? plan.segment(own, 0) : core::Span{};
  std::byte* memory = exchangeFrames(call, call.at(first), call.bytesOf(first), To::kNext, window * segment_slot);

  std::byte* slots = memory + slotBytes() * static_cast<std::size_t>(g);
  const bool in_frame = plan.segments(plan.receiveChunk(call.position, 0)) > 0;  // reduced[0] is in previous's frame
  const auto slot = [&](std::size_t i) {
    return in_frame && i == 0 ? memory + kHeaderBytes : slots + (i % window) * segment_slot;
  };
  std::vector<PointToPoint::WorkPtr> reduces;
  std::vector<PointToPoint::WorkPtr> gathers;
  if (in_frame) {
    reduces.emplace_back();
  }
  const auto post_reduces = [&](std::size_t done) {
    while (reduces.size() < std::min(reduced.size(), done + window)) {
      const std::size_t i = reduces.size();
      reduces.push_back(transport_.recv(slot(i), call.bytesOf(reduced[i]), previous, tag_base_ + kReduceScatter));
    }
  };
  const auto post_gathers = [&](std::size_t done) {
    if (line && reduces.size() < reduced.size()) {
      return;
    }
    const std::size_t ahead = line ? gathered.size() : done + window;  // they take no memory of their own
    while (gathers.size() < std::min(gathered.size(), ahead)) {
      const core::Span& span = gathered[gathers.size()];
      gathers.push_back(transport_.recv(call.at(span), call.bytesOf(span), previous, tag_base_ + kAllGather));
    }
  };
  const auto send_span = [&](const core::Span& span, SubsetTag tag) {
    send(call, call.at(span), call.bytesOf(span), next, tag);
  };

  RECORD_FUNCTION("torchext::move_bytes", std::vector<c10::IValue>{});
  const auto start = std::chrono::steady_clock::now();
  post_reduces(0);
  for (int i = 1; i < plan.segments(own); ++i) {
    send_span(plan.segment(own, i), kReduceScatter);
  }
  post_gathers(0);
  for (std::size_t i = 0; i < reduced.size(); ++i) {
    if (reduces[i]) {
      transport_.wait(reduces[i], previous, kOperation);
    }
    std::byte* sum = call.at(reduced[i]);
    const bool finished = i >= last_reduced;
    if (finished) {
      call.math.add_scaled(sum, slot(i), reduced[i].count, call.scale);
    } else {
      call.math.add(sum, slot(i), reduced[i].count);
    }
    post_reduces(i + 1);
    post_gathers(0);
    send_span(reduced[i], finished ? kAllGather : kReduceScatter);
  }
  faultPoint(FaultPoint::kSubsetHalfway);
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    transport_.wait(gathers[i], previous, kOperation);
    post_gathers(i + 1);
    if (i < forwarded) {
      send_span(gathered[i], kAllGather);
    }
  }
  finishSends(call);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  noteSpeed(call.bytes(), took.count());
}

}  // namespace torchext
