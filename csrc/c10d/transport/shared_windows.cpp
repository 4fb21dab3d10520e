#include "c10d/transport/shared_windows.h"

#include <cstdint>
#include <span>
#include <system_error>

#include <c10/util/Logging.h>

#include "c10d/fault/parse_message.h"

namespace torchext {
namespace {

constexpr const char* kHandshake = "sharing memory";

// Sends `own` to each of the ranks and returns what each sent; the own entry is left empty.
template <typename Message>
std::vector<Message> exchange(const PointToPoint& transport, int tag, const Message& own,
                              const std::vector<int>& ranks) {
  std::vector<Message> all(core::index(transport.size()));
  std::vector<PointToPoint::WorkPtr> sends;
  std::vector<PointToPoint::WorkPtr> receives;
  sends.reserve(ranks.size());
  receives.reserve(ranks.size());
  for (const int rank : ranks) {
    receives.push_back(transport.recv(&all[core::index(rank)], sizeof(Message), rank, tag));
  }
  for (const int rank : ranks) {
    sends.push_back(transport.send(&own, sizeof(Message), rank, tag));
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    transport.wait(receives[i], ranks[i], kHandshake);
    transport.wait(sends[i], ranks[i], kHandshake);
  }
  return all;
}

std::unique_ptr<core::SharedWindow> ownWindow(const core::WindowShape& shape) {
  try {
    return core::SharedWindow::create(shape);
  } catch (const std::system_error& error) {
    LOG(WARNING) << "torchext: no shared memory with other ranks of this host, data goes through sockets: "
                 << error.what();
    return nullptr;
  }
}

}  // namespace

std::unique_ptr<SharedWindows> SharedWindows::open(const PointToPoint& transport, int tag, bool enabled) {
  if (transport.size() == 1) {
    return nullptr;
  }
  const core::WindowShape shape{.ranks = transport.size(), .slots = kSlots, .slot_bytes = kSlotBytes};
  auto own = enabled ? ownWindow(shape) : nullptr;
  const core::WindowAddress address = own ? own->address() : core::WindowAddress{};
  std::vector<int> others;
  for (int rank = 0; rank < transport.size(); ++rank) {
    if (rank != transport.rank()) {
      others.push_back(rank);
    }
  }
  const auto addresses = exchange(transport, tag, address, others);
  std::vector<int> candidates;
  for (const int rank : others) {
    const auto& bytes = addresses[core::index(rank)];
    const auto peer = parseOrRefuse([&](const char* error) { return transport.refuse(rank, kHandshake, error); },
                                    core::parseWindowAddress, std::as_bytes(std::span(&bytes, 1)), rank);
    if (own && peer.space == address.space) {
      candidates.push_back(rank);
    }
  }
  if (candidates.empty()) {
    return nullptr;
  }
  std::unique_ptr<SharedWindows> windows(new SharedWindows(transport.rank(), std::move(own)));
  windows->peers_.resize(core::index(transport.size()));
  std::uint8_t mapped = 1;
  for (const int rank : candidates) {
    auto& peer = windows->peers_[core::index(rank)];
    peer = core::SharedWindow::open(addresses[core::index(rank)], shape);
    mapped = peer ? mapped : 0;
  }
  const auto answers = exchange(transport, tag, mapped, candidates);
  windows->own_->closeAddress();
  if (mapped == 0) {
    LOG(WARNING) << "torchext: rank " << transport.rank()
                 << " may not map the memory of other ranks of its host; its data goes through sockets";
    return nullptr;
  }
  bool partner = false;
  for (const int rank : candidates) {
    if (answers[core::index(rank)] != 1) {
      windows->peers_[core::index(rank)] = nullptr;
    }
    partner = partner || answers[core::index(rank)] == 1;
  }
  return partner ? std::move(windows) : nullptr;
}

bool SharedWindows::cover(const std::vector<int>& ranks) const {
  for (const int rank : ranks) {
    if (rank != rank_ && !peers_[core::index(rank)]) {
      return false;
    }
  }
  return true;
}

std::vector<int> SharedWindows::partners() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (rank == rank_ || peers_[core::index(rank)]) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

}  // namespace torchext
