// How directions are made, and how they reach the ranks that have not computed them: by messages, or through memory
// where all ranks share a host's.
//
// What travels is cut into instalments. Each leaves when its last direction is made; in steps that make inverses that
// is while others are still made: a layer's direction follows as soon as both of its inverses are there.
#include <algorithm>
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

// Puts layers together until a message is worth its start-up; alike on all ranks. Those of one owner in the order in
// which their factors come. Those of early layers, which come last, are apart: in most steps they stay at home.
void KfacEngine::planInstalments() {
  made_.assign(layers_.size(), false);
  instalment_of_.assign(layers_.size(), -1);
  const auto add = [&](int layer, int owner, int workers) {
    const auto enough = [&](const Instalment& last) {
      return leavesEarly() && sliceOf(last, /*part=*/0).nbytes() >= kLeastMessage;
    };
    const bool joins = !instalments_.empty() && instalments_.back().owner == owner &&
                       isEarly(instalments_.back().layers.front()) == isEarly(layer) && !enough(instalments_.back());
    if (!joins) {
      instalments_.push_back({.layers = {}, .owner = owner, .workers = workers});
      late_instalments_ += isEarly(layer) ? 0 : 1;
    }
    instalments_.back().layers.push_back(layer);
    instalment_of_[core::index(layer)] = static_cast<int>(instalments_.size()) - 1;
  };
  for (int owner = 0; owner < ranks_; ++owner) {
    for (int layer = static_cast<int>(layers_.size()) - 1; layer >= 0; --layer) {
      const auto i = core::index(layer);
      if (plan_.workers[i] < ranks_ && plan_.layer_owner[i] == owner) {
        add(layer, owner, plan_.workers[i]);
      }
    }
  }
  for (const int layer : directions_->split()) {
    add(layer, kSplit, ranks_);
  }
}

// What one rank has of it: its part of split layers; of others all.
at::Tensor KfacEngine::sliceOf(const Instalment& instalment, int part) const {
  const auto& layers = instalment.layers;
  if (instalment.owner == kSplit) {
    return directions_->splitSlice(part, layers.front(), layers.back());
  }
  // They lie in ascending order, and are listed in descending.
  const at::Tensor first = directions_->slice(layers.back());
  const at::Tensor last = directions_->slice(layers.front());
  return first.as_strided({last.storage_offset() + last.numel() - first.storage_offset()}, {1}, first.storage_offset());
}

// Begins a step's. early: those of early layers are made already.
void KfacEngine::startDirections(bool early) {
  direction_works_.clear();
  in_play_ = early ? late_instalments_ : instalments_.size();
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    made_[layer] = early && isEarly(static_cast<int>(layer));
  }
  for (Instalment& instalment : instalments_) {
    instalment.missing = instalment.layers.size();
  }
  if (leavesEarly()) {
    for (std::size_t i = 0; i < in_play_; ++i) {
      startMessages(messagesOf(i, /*sends=*/false));
    }
  }
}

// This rank's part of a layer's direction, unless it is made; sends what that completes.
void KfacEngine::makeDirection(int layer) {
  if (made_[core::index(layer)]) {
    return;
  }
  made_[core::index(layer)] = true;
  if (worksOn(layer) && !takeRows(layer)) {
    const Timed timed(stats_.precondition_seconds);
    const std::size_t outputs = 2 * (layers_.size() - 1 - core::index(layer));
    directions_->precondition(layer, directions_->parts(layer) > 1 ? rank_ : 0, inverses_[outputs + 1],
                              inverses_[outputs], options_.form, options_.damping);
  }
  const int number = instalment_of_[core::index(layer)];
  if (number >= 0 && --instalments_[core::index(number)].missing == 0 && leavesEarly()) {
    startMessages(messagesOf(core::index(number), /*sends=*/true));
  }
}

// Makes the rest, first what others wait for, and returns when all directions are here.
void KfacEngine::finishDirections() {
  for (std::size_t i = 0; i < in_play_; ++i) {
    for (const int layer : instalments_[i].layers) {
      makeDirection(layer);
    }
  }
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    makeDirection(layer);
  }
  if (throughMemory()) {
    gatherDirections();
  } else if (exchange_ && !leavesEarly()) {  // of a device: all together
    Messages messages;
    for (const bool sends : {false, true}) {
      for (std::size_t i = 0; i < in_play_; ++i) {
        append(messages, messagesOf(i, sends));
      }
    }
    startMessages(messages);
  }
  const Timed timed(stats_.distribute_seconds);
  KfacExchange::wait(direction_works_);
}

void KfacEngine::startMessages(const Messages& messages) {
  const Timed timed(stats_.distribute_seconds);
  auto started = exchange_->start(messages);
  std::move(started.begin(), started.end(), std::back_inserter(direction_works_));
}

// What brings an instalment from its workers to the other ranks; or every rank's part to every other. Point to point:
// Gloo hands its collectives to threads of its own, which on a machine without spare cores takes longer than the
// transfer.
Messages KfacEngine::messagesOf(std::size_t number, bool sends) const {
  using core::KfacPlan;
  const Instalment& instalment = instalments_[number];
  const int tag = kDirectionsTag + static_cast<int>(number);
  Messages messages;
  if (instalment.owner == kSplit) {
    for (int distance = 1; distance < ranks_; ++distance) {
      const int peer = (rank_ + (sends ? distance : ranks_ - distance)) % ranks_;
      const at::Tensor share = sliceOf(instalment, sends ? rank_ : peer);
      if (share.numel() > 0) {
        messages.push_back({share, peer, tag, sends});
      }
    }
    return messages;
  }
  const auto [owner, workers] = std::pair(instalment.owner, instalment.workers);
  for (int rank = 0; rank < ranks_; ++rank) {
    if (KfacPlan::isWorker(rank, owner, workers, ranks_)) {
      continue;
    }
    const int from = KfacPlan::serverOf(rank, owner, workers, ranks_);
    if (sends && from == rank_) {
      messages.push_back({sliceOf(instalment, 0), rank, tag, sends});
    } else if (!sends && rank == rank_) {
      messages.push_back({sliceOf(instalment, 0), from, tag, sends});
    }
  }
  return messages;
}

void KfacEngine::gatherDirections() {
  const Timed timed(stats_.distribute_seconds);
  std::vector<at::Tensor> owned(core::index(ranks_));
  for (std::size_t i = 0; i < in_play_; ++i) {
    const Instalment& instalment = instalments_[i];
    if (instalment.owner != kSplit) {  // one for each owner; its other workers have the same already
      owned[core::index(instalment.owner)] = sliceOf(instalment, 0);
    }
  }
  exchange_->gatherParts(owned);
  const auto& split = directions_->split();
  const auto end = std::find_if(split.begin(), split.end(),
                                [&](int layer) { return core::index(instalment_of_[core::index(layer)]) >= in_play_; });
  std::vector<at::Tensor> shares(core::index(ranks_));
  for (int rank = 0; end != split.begin() && rank < ranks_; ++rank) {
    shares[core::index(rank)] = directions_->splitSlice(rank, split.front(), *std::prev(end));
  }
  exchange_->gatherParts(shares);
}

}  // namespace torchext
