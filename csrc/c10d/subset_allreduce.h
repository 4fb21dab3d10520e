// SubsetAllreduce: sum or average of one contiguous buffer over any subset of ranks, by point-to-point alone.
//
// Members are data of the call (Luo et al., ASPLOS 2020, section 4.1, "P-Reduce"): no communicator, no connection and
// no rank outside the subset is involved, so the first use of a subset sets nothing up.
//
// Algorithm, chosen by size (N bytes, g members):
//   direct   small: everyone sends [header | payload] to everyone; 1 round, (g - 1) N bytes sent. Recursive doubling
//            would send log2(g) N, but in log2(g) rounds, and a member whose size differs would be noticed by its
//            partners only: the others would wait. Groups are small, rounds are what costs.
//   ring     large: headers all-to-all (1 round), then reduce-scatter and all-gather in segments, 2 (g - 1) / g N
//            bytes sent, receives posted ahead, the scale fused into the last addition.
// Members end bit-equal: direct adds in member order everywhere; in the ring one member computes a chunk, the others
// copy it.
//
// Mismatch (numel, dtype, members or call id differ between members): every member throws c10::DistBackendError naming
// two ranks and what each passed, before any buffer is touched; the connection stays usable.
//
// Threads: run() blocks; one call at a time for an object (its scratch memory is reused). Two objects on one backend
// need different tag bases. Never holds the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/point_to_point.h"
#include "c10d/reduction.h"
#include "c10d/subset_header.h"

namespace torchext {

struct TransferTuning {
  std::size_t direct_bytes = 128 * 1024;        // payloads up to this size travel with their header, in one message
  std::size_t direct_total_bytes = 512 * 1024;  // and (g - 1) of them together up to this
  std::size_t segment_bytes = 512 * 1024;       // largest ring message
  std::size_t segments_ahead = 4;               // receives of the reduce-scatter posted ahead
};

class SubsetAllreduce {
 public:
  // tag_base .. tag_base + 2 are this object's tags on the backend.
  SubsetAllreduce(PointToPoint transport, int tag_base, TransferTuning tuning = {});

  // In place over `buffer` (CPU, contiguous, a reducible dtype). members: sorted, unique, containing the caller.
  // call_id: the same on all members (a group's id); a difference is reported as a mismatch.
  // scale: applied to the sum (1 / g averages).
  void run(const at::Tensor& buffer, const std::vector<int>& members, std::uint64_t call_id, double scale);

  // Since construction: bytes sent (headers included), and seconds waited until all members had entered the call.
  std::uint64_t bytesSent() const { return bytes_sent_; }
  double peerSeconds() const { return peer_seconds_; }

 private:
  struct Call;

  void direct(Call& call);
  void ring(Call& call);
  void exchangeHeaders(Call& call);

  PointToPoint::WorkPtr send(const void* data, std::size_t bytes, int destination, int tag);
  std::byte* scratch(std::size_t bytes);
  SubsetHeader headerOf(const Call& call) const;

  PointToPoint transport_;
  int tag_base_;
  TransferTuning tuning_;
  std::vector<std::byte> scratch_;
  std::uint64_t bytes_sent_ = 0;
  double peer_seconds_ = 0.0;
};

}  // namespace torchext
