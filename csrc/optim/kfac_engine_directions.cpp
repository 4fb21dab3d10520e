// How directions are made, and how they reach the ranks that have not computed them: by messages, or through memory
// where all ranks share a host's.
#include <iterator>

#include "core/check.h"
#include "optim/kfac_engine.h"
#include "optim/timed.h"

namespace torchext {
namespace {

using Message = KfacExchange::Message;
using Messages = std::vector<Message>;

// An instalment's message takes milliseconds then on a link of a Gb/s, where starting one takes tenths of it.
constexpr std::size_t kLeastMessage = std::size_t{256} << 10;

void append(Messages& messages, Messages more) { std::move(more.begin(), more.end(), std::back_inserter(messages)); }

}  // namespace

// Messages between CPUs need no call for all of them together: some are on their way while others are made.
bool KfacEngine::leavesEarly() const { return exchange_ && !queued_ && !throughMemory(); }

// Puts split layers together until a message is worth its start-up; alike on all ranks. Those of early layers, which
// come last, are apart: in most steps they stay at home.
void KfacEngine::planInstalments() {
  const auto& split = directions_->split();
  std::size_t begin = 0;
  for (std::size_t end = 1; end <= split.size(); ++end) {
    const bool enough = leavesEarly() && directions_->splitSlice(/*part=*/0, begin, end).nbytes() >= kLeastMessage;
    const bool last = end == split.size() || isEarly(split[end]) != isEarly(split[end - 1]);
    if (enough || last) {
      instalments_.push_back({begin, end});
      begin = end;
      late_instalments_ += isEarly(split[end - 1]) ? 0 : 1;
    }
  }
}

// early: those of early layers are made.
void KfacEngine::makeDirections(bool early) {
  const std::size_t instalments = early ? late_instalments_ : instalments_.size();
  std::vector<KfacExchange::Work> works;
  const auto start = [&](const Messages& messages) {
    const Timed timed(stats_.distribute_seconds);
    auto started = exchange_->start(messages);
    std::move(started.begin(), started.end(), std::back_inserter(works));
  };
  const bool at_once = leavesEarly();
  Messages late;  // of a device: all together, when all is made
  const auto send = [&](Messages messages) { at_once ? start(messages) : append(late, std::move(messages)); };
  const bool by_messages = exchange_ && !throughMemory();
  if (by_messages) {
    Messages coming = ownedMessages(/*sends=*/false);
    for (std::size_t i = 0; i < instalments; ++i) {
      append(coming, shareMessages(i, /*sends=*/false));
    }
    send(std::move(coming));
  }
  for (const int layer : directions_->whole()) {
    if (worksOn(layer) && !(early && isEarly(layer))) {
      precondition(layer, /*part=*/0);
    }
  }
  if (by_messages) {
    send(ownedMessages(/*sends=*/true));
  }
  for (std::size_t i = 0; i < instalments; ++i) {
    for (std::size_t place = instalments_[i].begin; place < instalments_[i].end; ++place) {
      precondition(directions_->split()[place], rank_);
    }
    if (by_messages) {
      send(shareMessages(i, /*sends=*/true));
    }
  }
  if (!late.empty()) {
    start(late);
  }
  if (throughMemory()) {
    gatherDirections(instalments);
  }
  const Timed timed(stats_.distribute_seconds);
  KfacExchange::wait(works);
}

void KfacEngine::precondition(int layer, int part) {
  const Timed timed(stats_.precondition_seconds);
  const std::size_t outputs = 2 * (layers_.size() - 1 - core::index(layer));
  directions_->precondition(layer, part, inverses_[outputs + 1], inverses_[outputs], options_.form, options_.damping);
}

// Directions of the layers that `owner` and some others compute, which lie together.
KfacEngine::OwnedDirections KfacEngine::ownedBy(int owner) const {
  OwnedDirections owned{{}, ranks_};
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (plan_.workers[layer] == ranks_ || plan_.layer_owner[layer] != owner) {
      continue;
    }
    owned.workers = plan_.workers[layer];
    const at::Tensor one = directions_->slice(static_cast<int>(layer));
    at::Tensor& all = owned.slice;
    all = !all.defined()
              ? one
              : all.as_strided({one.storage_offset() + one.numel() - all.storage_offset()}, {1}, all.storage_offset());
  }
  return owned;
}

// What brings them from their workers to the other ranks.
Messages KfacEngine::ownedMessages(bool sends) const {
  using core::KfacPlan;
  Messages messages;
  for (int owner = 0; owner < ranks_; ++owner) {
    const auto [slice, workers] = ownedBy(owner);
    for (int rank = 0; slice.defined() && rank < ranks_; ++rank) {
      if (KfacPlan::isWorker(rank, owner, workers, ranks_)) {
        continue;
      }
      const int from = KfacPlan::serverOf(rank, owner, workers, ranks_);
      if (sends && from == rank_) {
        messages.push_back({slice, rank, kDirectionsTag + owner, sends});
      } else if (!sends && rank == rank_) {
        messages.push_back({slice, from, kDirectionsTag + owner, sends});
      }
    }
  }
  return messages;
}

// Every rank's share of some split directions to every other. Point to point: Gloo hands its collectives to threads of
// its own, which on a machine without spare cores takes longer than the transfer.
Messages KfacEngine::shareMessages(std::size_t instalment, bool sends) const {
  const auto [begin, end] = instalments_[instalment];
  const int tag = kSharesTag + static_cast<int>(instalment);
  Messages messages;
  for (int distance = 1; distance < ranks_; ++distance) {
    const int peer = (rank_ + (sends ? distance : ranks_ - distance)) % ranks_;
    const at::Tensor share = directions_->splitSlice(sends ? rank_ : peer, begin, end);
    if (share.numel() > 0) {
      messages.push_back({share, peer, tag, sends});
    }
  }
  return messages;
}

void KfacEngine::gatherDirections(std::size_t instalments) {
  const std::size_t split = instalments > 0 ? instalments_[instalments - 1].end : 0;
  const Timed timed(stats_.distribute_seconds);
  std::vector<at::Tensor> owned;
  std::vector<at::Tensor> shares;
  for (int rank = 0; rank < ranks_; ++rank) {
    owned.push_back(ownedBy(rank).slice);  // other workers have the same already
    shares.push_back(directions_->splitSlice(rank, 0, split));
  }
  exchange_->gatherParts(owned);
  exchange_->gatherParts(shares);
}

}  // namespace torchext
