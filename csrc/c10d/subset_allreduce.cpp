#include "c10d/subset_allreduce.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>

#include "core/subset_plan.h"

namespace torchext {
namespace {

// One tag for each kind of message: they match in the order posted, and the ring posts its kinds out of order.
enum Tag { kFrame = 0, kReduceScatter = 1, kAllGather = 2 };

constexpr const char* kName = "partial_all_reduce";
constexpr std::size_t kHeaderBytes = sizeof(SubsetHeader);

std::string describe(const SubsetHeader& header) {
  return c10::str(header.numel, " elements of ", c10::toString(static_cast<c10::ScalarType>(header.dtype)),
                  " scaled by ", header.scale, " in call ", header.call_id);
}

[[noreturn]] void throwMismatch(const SubsetHeader& own, const SubsetHeader& other) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str("partial_all_reduce: rank ", own.rank, " passed ", describe(own), ", rank ", other.rank, " passed ",
               describe(other),
               "; members, dtype, number of elements and the order of calls must agree on all members. No buffer was "
               "changed."));
}

void checkWire(const SubsetHeader& header, int source) {
  if (header.magic != SubsetHeader::kMagic || header.version != SubsetHeader::kVersion || header.rank != source) {
    C10_THROW_ERROR(DistBackendError, c10::str("partial_all_reduce: malformed header from rank ", source, " (magic ",
                                               header.magic, ", version ", header.version, ", rank ", header.rank,
                                               "): do all ranks run the same torchext?"));
  }
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

  std::size_t bytes() const { return count * math.element_bytes; }
  int size() const { return static_cast<int>(members.size()); }
  int member(int position_) const { return members[static_cast<std::size_t>((position_ + size()) % size())]; }
};

SubsetAllreduce::SubsetAllreduce(PointToPoint transport, int tag_base, TransferTuning tuning)
    : transport_(std::move(transport)), tag_base_(tag_base), tuning_(tuning) {}

std::byte* SubsetAllreduce::scratch(std::size_t bytes) {
  if (scratch_.size() < bytes) {
    scratch_.resize(bytes);
  }
  return scratch_.data();
}

PointToPoint::WorkPtr SubsetAllreduce::send(const void* data, std::size_t bytes, int destination, int tag) {
  bytes_sent_ += bytes;
  return transport_.send(data, bytes, destination, tag_base_ + tag);
}

SubsetHeader SubsetAllreduce::headerOf(const Call& call) const {
  SubsetHeader header;
  header.dtype = static_cast<std::int16_t>(call.dtype);
  header.rank = transport_.rank();
  header.call_id = call.id;
  header.members_hash = hashMembers(call.members);
  header.scale = static_cast<float>(call.scale);
  header.numel = static_cast<std::int64_t>(call.count);
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
  } else if (call.bytes() <= tuning_.direct_bytes &&
             call.bytes() * (members.size() - 1) <= tuning_.direct_total_bytes) {
    direct(call);
  } else {
    ring(call);
  }
}

// Everyone sends its whole frame to everyone. The receives are as long as any direct frame, so a member that passed
// another size is found by its header and not by a broken connection.
void SubsetAllreduce::direct(Call& call) {
  const std::size_t slot = kHeaderBytes + tuning_.direct_bytes;
  const int others = call.size() - 1;
  std::byte* memory = scratch(slot * static_cast<std::size_t>(call.size()));
  std::byte* frame = memory + slot * static_cast<std::size_t>(others);
  const SubsetHeader own = headerOf(call);
  std::vector<PointToPoint::WorkPtr> receives;
  std::vector<PointToPoint::WorkPtr> sends;
  for (int i = 0; i < others; ++i) {
    // Neighbours first, each member in an order of its own, so that no member is everybody's first target.
    receives.push_back(transport_.recv(memory + slot * static_cast<std::size_t>(i), slot,
                                       call.member(call.position - 1 - i), tag_base_ + kFrame));
  }
  std::memcpy(frame, &own, kHeaderBytes);
  std::memcpy(frame + kHeaderBytes, call.data, call.bytes());
  for (int i = 0; i < others; ++i) {
    sends.push_back(send(frame, kHeaderBytes + call.bytes(), call.member(call.position + 1 + i), kFrame));
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<const std::byte*> payload(static_cast<std::size_t>(call.size()));
  payload[static_cast<std::size_t>(call.position)] = frame + kHeaderBytes;
  std::optional<SubsetHeader> differing;
  for (int i = 0; i < others; ++i) {
    const int position = (call.position - 1 - i + call.size()) % call.size();
    const int source = call.member(position);
    const std::byte* received = memory + slot * static_cast<std::size_t>(i);
    transport_.wait(receives[static_cast<std::size_t>(i)], source, kName);
    SubsetHeader header;
    std::memcpy(&header, received, kHeaderBytes);
    checkWire(header, source);
    if (!own.sameCall(header)) {
      differing = header;
    }
    payload[static_cast<std::size_t>(position)] = received + kHeaderBytes;
  }
  peer_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (int i = 0; i < others; ++i) {
    transport_.wait(sends[static_cast<std::size_t>(i)], call.member(call.position + 1 + i), kName);
  }
  if (differing) {
    throwMismatch(own, *differing);
  }
  // In member order on every member: floating-point addition does not associate, and members must end bit-equal.
  std::memcpy(call.data, payload[0], call.bytes());
  for (int i = 1; i + 1 < call.size(); ++i) {
    call.math.add(call.data, payload[static_cast<std::size_t>(i)], call.count);
  }
  call.math.add_scaled(call.data, payload.back(), call.count, call.scale);
}

// One round, header to everyone: a ring's messages have sizes that all members must agree on beforehand. The receives
// are as long as a direct frame, because a member with a smaller tensor sends one.
void SubsetAllreduce::exchangeHeaders(Call& call) {
  const std::size_t slot = kHeaderBytes + tuning_.direct_bytes;
  const int others = call.size() - 1;
  std::byte* memory = scratch(slot * static_cast<std::size_t>(others));
  const SubsetHeader own = headerOf(call);
  std::optional<SubsetHeader> differing;
  std::vector<PointToPoint::WorkPtr> receives;
  std::vector<PointToPoint::WorkPtr> sends;
  for (int i = 1; i <= others; ++i) {
    receives.push_back(transport_.recv(memory + slot * static_cast<std::size_t>(i - 1), slot,
                                       call.member(call.position + i), tag_base_ + kFrame));
  }
  for (int i = 1; i <= others; ++i) {
    sends.push_back(send(&own, kHeaderBytes, call.member(call.position + i), kFrame));
  }
  const auto start = std::chrono::steady_clock::now();
  for (int i = 1; i <= others; ++i) {
    const int source = call.member(call.position + i);
    transport_.wait(receives[static_cast<std::size_t>(i - 1)], source, kName);
    SubsetHeader header;
    std::memcpy(&header, memory + slot * static_cast<std::size_t>(i - 1), kHeaderBytes);
    checkWire(header, source);
    if (!own.sameCall(header)) {
      differing = header;
    }
  }
  peer_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (int i = 1; i <= others; ++i) {
    transport_.wait(sends[static_cast<std::size_t>(i - 1)], call.member(call.position + i), kName);
  }
  if (differing) {
    throwMismatch(own, *differing);
  }
}

// Reduce-scatter then all-gather around the ring of members (core::RingPlan). A chunk travels in segments; a segment is
// passed on as soon as it is added, so steps overlap. The receives of the all-gather go straight into the buffer and
// are posted at the start: a final segment cannot arrive before this member's own partial one has been used downstream.
void SubsetAllreduce::ring(Call& call) {
  exchangeHeaders(call);
  const int g = call.size();
  const std::size_t element = call.math.element_bytes;
  // At least two segments a chunk, so that one travels while the other is added.
  const std::size_t chunk_bytes = call.bytes() / static_cast<std::size_t>(g);
  const std::size_t segment_bytes = std::clamp(chunk_bytes / 2, std::size_t{32} * 1024, tuning_.segment_bytes);
  const core::RingPlan plan(call.count, element, g, segment_bytes);
  const int next = call.member(call.position + 1);
  const int previous = call.member(call.position - 1);
  const auto address = [&](const core::Span& span) { return call.data + span.begin * element; };

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
  if (g == 2) {
    forwarded = 0;
  }

  std::vector<PointToPoint::WorkPtr> reduces;
  std::vector<PointToPoint::WorkPtr> gathers;
  std::vector<PointToPoint::WorkPtr> sends;
  const std::size_t ahead = std::min(reduced.size(), std::max<std::size_t>(2, tuning_.segments_ahead));
  const std::size_t slot_bytes = plan.largestSegment() * element;
  std::byte* slots = scratch(ahead * slot_bytes);
  const auto slot = [&](std::size_t i) { return slots + (i % ahead) * slot_bytes; };
  const auto postReduce = [&](std::size_t i) {
    reduces.push_back(transport_.recv(slot(i), reduced[i].count * element, previous, tag_base_ + kReduceScatter));
  };
  const auto sendSpan = [&](const core::Span& span, Tag tag) {
    sends.push_back(send(address(span), span.count * element, next, tag));
  };
  for (std::size_t i = 0; i < ahead; ++i) {
    postReduce(i);
  }
  const int own = plan.sendChunk(call.position, 0);
  for (int i = 0; i < plan.segments(own); ++i) {
    sendSpan(plan.segment(own, i), kReduceScatter);
  }
  for (const core::Span& span : gathered) {
    gathers.push_back(transport_.recv(address(span), span.count * element, previous, tag_base_ + kAllGather));
  }
  for (std::size_t i = 0; i < reduced.size(); ++i) {
    transport_.wait(reduces[i], previous, kName);
    std::byte* sum = address(reduced[i]);
    if (i >= last_reduced) {
      call.math.add_scaled(sum, slot(i), reduced[i].count, call.scale);
      sendSpan(reduced[i], kAllGather);
    } else {
      call.math.add(sum, slot(i), reduced[i].count);
      sendSpan(reduced[i], kReduceScatter);
    }
    if (i + ahead < reduced.size()) {
      postReduce(i + ahead);
    }
  }
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    transport_.wait(gathers[i], previous, kName);
    if (i < forwarded) {
      sendSpan(gathered[i], kAllGather);
    }
  }
  for (const auto& sent : sends) {
    transport_.wait(sent, next, kName);
  }
}

}  // namespace torchext
