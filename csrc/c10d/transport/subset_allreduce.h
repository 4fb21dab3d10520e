// SubsetAllreduce: sum or average of one contiguous buffer over any subset of ranks, by point-to-point alone.
//
// Members are data of the call (Luo et al., ASPLOS 2020, section 4.1, "P-Reduce"): no communicator, no connection and
// no rank outside the subset is involved, so the first use of a subset sets nothing up.
//
// Every call begins with one frame, [header | payload], from every member to every other. Algorithm, chosen by size
// (N bytes, g members) and by where the members are:
//   windows  all on one host, sharing memory: the payload is empty, the data goes through memory (window_allreduce.h);
//   direct   small: the payload is everything; 1 round, (g - 1) N bytes sent. Recursive doubling would send log2(g) N,
//            but in log2(g) rounds, and a member whose size differs would be noticed by its partners only: the others
//            would wait. Groups are small, rounds are what costs. For g = 2 it sends no more than a ring.
//   ring     large: the payload is the ring's first segment, to the next member, nothing to the others; then
//            reduce-scatter and all-gather in segments, 2 (g - 1) / g N bytes sent, receives posted ahead, the scale
//            fused into the last addition.
// Members end bit-equal: direct adds in member order everywhere; in the ring and in windows one member computes a
// chunk, the others copy it.
//
// Mismatch (numel, dtype, members or call id differ between members): every member throws c10::DistBackendError naming
// two ranks and what each passed, before any buffer is touched; the connection stays usable.
//
// Threads: run() blocks; one call at a time for an object (its scratch memory is reused). Two objects on one backend
// need different tag bases. Never holds the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/transport/point_to_point.h"
#include "c10d/transport/reduction.h"
#include "c10d/transport/shared_windows.h"
#include "c10d/transport/window_allreduce.h"
#include "core/transport/subset_header.h"

namespace torchext {

// Sizes in bytes.
struct TransferTuning {
  std::size_t frame_bytes = 1U << 20U;         // largest payload of a frame
  std::size_t direct_total_bytes = 1U << 19U;  // direct for g > 2: up to this in (g - 1) payloads together
  // Of a ring. Largest: what is received should still be in the cache when it is added. Two members share one
  // connection for both directions, where every message may wait for one of the other direction: fewer, larger ones.
  std::size_t segment_bytes = 1U << 19U;
  std::size_t segment_bytes_of_pair = 1U << 20U;
  std::size_t least_segment_bytes = 1U << 18U;  // below this a message costs more than it hides
  // Receives posted ahead: where bytes move as fast as memory, what is under way should fit the caches, and a sender
  // whose receiver is not ready waits in its own memory instead of the kernel's. A line is idle until its sender hears
  // of the next receive, which stands in a queue behind the data that goes the other way: it needs more.
  std::size_t segments_ahead = 2;
  std::size_t segments_ahead_of_line = 8;
  double line_bytes_per_second = 4e8;  // up to here it is a line
  // Through shared memory from here on, in (g - 1) payloads together; below it they travel in the frames.
  std::size_t least_shared_bytes = 1U << 17U;
};

class SubsetAllreduce {
 public:
  // tag_base .. tag_base + 2 are this object's tags on the backend.
  // windows: of the transport's ranks; null: all data goes through the transport.
  SubsetAllreduce(PointToPoint transport, int tag_base, std::unique_ptr<SharedWindows> windows,
                  TransferTuning tuning = {});

  // In place over `buffer` (CPU, contiguous, a reducible dtype). members: sorted, unique, containing the caller.
  // call_id: the same on all members (a group's id); a difference is reported as a mismatch.
  // scale: applied to the sum (1 / g averages).
  void run(const at::Tensor& buffer, const std::vector<int>& members, std::uint64_t call_id, double scale);

  // Since construction: bytes sent (headers included), bytes of tensors averaged through shared memory, and seconds
  // waited until all members had entered the call.
  std::uint64_t bytesSent() const { return bytes_sent_; }
  std::uint64_t bytesShared() const { return bytes_shared_; }
  double peerSeconds() const { return peer_seconds_; }

 private:
  struct Call;
  enum class To { kNobody, kNext, kAll };

  void shared(Call& call);
  void direct(Call& call);
  void ring(Call& call);
  // Returns scratch memory: slot i of slotBytes() holds the frame of the member i + 1 places before the caller, the
  // g-th slot the caller's own, then follow `more_scratch` bytes. Throws if the members disagree.
  std::byte* exchangeFrames(Call& call, const void* payload, std::size_t payload_bytes, To to,
                            std::size_t more_scratch);
  // Of the last ring: what a line is known by, which costs memory. Before the first nothing is known.
  void noteSpeed(std::size_t bytes, double seconds) { bytes_per_second_ = static_cast<double>(bytes) / seconds; }
  bool onLine() const { return bytes_per_second_ > 0 && bytes_per_second_ <= tuning_.line_bytes_per_second; }
  std::size_t slotBytes() const { return sizeof(core::SubsetHeader) + tuning_.frame_bytes; }

  void send(Call& call, const void* data, std::size_t bytes, int destination, int tag);
  void finishSends(Call& call);
  std::byte* scratch(std::size_t bytes);
  core::SubsetHeader headerOf(const Call& call) const;

  PointToPoint transport_;
  int tag_base_;
  TransferTuning tuning_;
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_bytes_ = 0;
  std::unique_ptr<WindowAllreduce> windows_;
  std::uint64_t bytes_sent_ = 0;
  std::uint64_t bytes_shared_ = 0;
  double peer_seconds_ = 0.0;
  double bytes_per_second_ = 0.0;
};

}  // namespace torchext
