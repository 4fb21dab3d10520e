#include "c10d/backend/link_probe.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Logging.h>

#include "c10d/backend/attachable_backend.h"

#include "c10d/threads/outstanding_averages.h"
#include "core/dssync/round_robin.h"

namespace torchext {
namespace {

using Clock = std::chrono::steady_clock;
using Matrix = std::vector<std::vector<double>>;

constexpr std::uint64_t kFirstBytes = 1U << 16U;  // also opens the connection's window
constexpr std::uint64_t kMostBytes = 1U << 22U;
constexpr std::uint64_t kGrowth = 4;
constexpr int kRepeats =
    4;  // of the last size: a connection that starts may overrun a queue, and waits for what it lost
constexpr int kTag = AttachableBackend::kGroupTags;

class Prober {
 public:
  explicit Prober(PointToPoint transport)
      : transport_(std::move(transport)), memory_(std::make_unique<std::byte[]>(kMostBytes)) {}

  // Bytes a second to `peer`, which answers meanwhile.
  double measure(int peer) {
    std::uint64_t bytes = kFirstBytes;
    Clock::duration best = fastest(peer, bytes);
    while (best < kProbeTime && bytes < kMostBytes) {
      bytes = std::min(kMostBytes, bytes * kGrowth);
      best = fastest(peer, bytes);
    }
    sendWord(0, peer);
    return static_cast<double>(bytes) / std::chrono::duration<double>(best).count();
  }

  void answer(int peer) {
    while (const std::uint64_t bytes = receiveWord(peer)) {
      TORCH_CHECK_WITH(DistBackendError, bytes <= kMostBytes, "dssync: rank ", peer, " announced a probe of ", bytes,
                       " bytes, more than ", kMostBytes, "; all ranks must run the same torchext");
      transport_.wait(transport_.recv(memory_.get(), bytes, peer, kTag), peer, kWhat);
      sendWord(bytes, peer);
    }
  }

 private:
  static constexpr const char* kWhat = "measuring links";

  Clock::duration fastest(int peer, std::uint64_t bytes) {
    Clock::duration best = send(peer, bytes);
    for (int repeat = 1; repeat < kRepeats; ++repeat) {
      best = std::min(best, send(peer, bytes));
    }
    return best;
  }

  Clock::duration send(int peer, std::uint64_t bytes) {
    const auto start = Clock::now();
    sendWord(bytes, peer);
    transport_.wait(transport_.send(memory_.get(), bytes, peer, kTag), peer, kWhat);
    receiveWord(peer);  // it has arrived
    return Clock::now() - start;
  }

  void sendWord(std::uint64_t word, int peer) {
    transport_.wait(transport_.send(&word, sizeof word, peer, kTag), peer, kWhat);
  }
  std::uint64_t receiveWord(int peer) {
    std::uint64_t word = 0;
    transport_.wait(transport_.recv(&word, sizeof word, peer, kTag), peer, kWhat);
    return word;
  }

  PointToPoint transport_;
  std::unique_ptr<std::byte[]> memory_;
};

// Every pair of `ranks`, the same on all ranks; those that are not among them only learn the result.
Matrix measurePairs(const PointToPoint& transport, c10d::Backend& group, const std::vector<int>& ranks) {
  const int size = static_cast<int>(ranks.size());
  at::Tensor own = at::zeros({size, size}, at::kDouble);
  const auto found = std::find(ranks.begin(), ranks.end(), group.getRank());
  if (found != ranks.end()) {
    Prober prober(transport);
    const int self = static_cast<int>(found - ranks.begin());
    for (int round = 0; round < core::roundRobinRounds(size); ++round) {
      const int other = core::roundRobinPartner(size, round, self);
      if (other > self) {
        own[self][other] = prober.measure(ranks[static_cast<std::size_t>(other)]);
      } else if (other >= 0) {
        prober.answer(ranks[static_cast<std::size_t>(other)]);
      }
    }
  }
  std::vector<at::Tensor> all{own};
  const InternalCollective internal;
  group.allreduce(all, c10d::AllreduceOptions())->wait();
  const at::Tensor symmetric = own + own.t();
  Matrix result(ranks.size(), std::vector<double>(ranks.size()));
  for (int a = 0; a < size; ++a) {
    for (int b = 0; b < size; ++b) {
      result[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)] = symmetric[a][b].item<double>();
    }
  }
  return result;
}

double best(const std::vector<double>& row) { return row.empty() ? 0.0 : *std::max_element(row.begin(), row.end()); }

}  // namespace

core::RackMap measureRacks(const PointToPoint& transport, c10d::Backend& group, const std::vector<int>& host_of) {
  RECORD_FUNCTION("torchext::measure_racks", std::vector<c10::IValue>{});
  core::RackMap map{.host_of = host_of};
  std::vector<int> first_of_host;
  for (std::size_t rank = 0; rank < host_of.size(); ++rank) {
    if (static_cast<std::size_t>(host_of[rank]) == first_of_host.size()) {
      first_of_host.push_back(static_cast<int>(rank));
    }
  }
  const Matrix pairs = measurePairs(transport, group, first_of_host);
  map.rack_of = core::findRacks(pairs);
  const auto racks = static_cast<std::size_t>(1 + *std::max_element(map.rack_of.begin(), map.rack_of.end()));
  map.uplink_bandwidth.assign(racks, 1.0);
  if (racks == 1) {
    return map;
  }
  // Of each rack the host with the fastest link: a slow one would hide the uplink.
  std::vector<std::size_t> fastest(racks, pairs.size());
  map.host_bandwidth = 0.0;
  for (std::size_t host = 0; host < pairs.size(); ++host) {
    std::size_t& chosen = fastest[static_cast<std::size_t>(map.rack_of[host])];
    if (chosen == pairs.size() || best(pairs[host]) > best(pairs[chosen])) {
      chosen = host;
    }
    map.host_bandwidth = std::max(map.host_bandwidth, best(pairs[host]));
  }
  std::vector<int> of_racks;
  of_racks.reserve(racks);
  for (const std::size_t host : fastest) {
    of_racks.push_back(first_of_host[host]);
  }
  const Matrix uplinks = measurePairs(transport, group, of_racks);
  for (std::size_t rack = 0; rack < racks; ++rack) {
    map.uplink_bandwidth[rack] = best(uplinks[rack]);
  }
  LOG(INFO) << group.getBackendName() << ": found " << racks << " racks of " << pairs.size()
            << " hosts; bytes a second: hosts " << map.host_bandwidth << ", uplinks "
            << c10::Join(", ", map.uplink_bandwidth);
  return map;
}

}  // namespace torchext
