#include "kfac/precondition/gradient_exchange.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/base/check.h"
#include "kfac/comm/kfac_tags.h"

namespace torchext {
namespace {

using Message = KfacExchange::Message;
using Messages = std::vector<Message>;

// An instalment's message takes milliseconds then on a link of a Gb/s, where starting one takes tenths of it.
constexpr std::size_t kLeastMessage = std::size_t{256} << 10;

void append(Messages& messages, Messages more) { std::move(more.begin(), more.end(), std::back_inserter(messages)); }

}  // namespace

// Those of one owner in the order in which their factors come, last layer first; then those that are split.
GradientExchange::GradientExchange(const core::KfacPlan& plan, const Preconditioner& directions,
                                   const std::vector<bool>& at_home, KfacExchange* exchange, bool on_device)
    : directions_(directions),
      exchange_(exchange),
      ranks_(plan.ranks),
      rank_(exchange != nullptr ? exchange->rank() : 0),
      on_device_(on_device),
      instalment_of_(plan.workers.size(), -1) {
  for (int owner = 0; owner < ranks_; ++owner) {
    for (int layer = static_cast<int>(plan.workers.size()) - 1; layer >= 0; --layer) {
      const auto i = core::index(layer);
      if (plan.workers[i] < ranks_ && plan.layer_owner[i] == owner) {
        add(layer, owner, plan.workers[i], at_home);
      }
    }
  }
  for (const int layer : directions_.split()) {
    add(layer, kSplit, ranks_, at_home);
  }
}

// Messages between CPUs need no call for all of them together: some are on their way while others are made.
bool GradientExchange::leavesEarly() const { return exchange_ != nullptr && !on_device_ && !exchange_->sharesMemory(); }

// Puts layers together until a message is worth its start-up; alike on all ranks.
void GradientExchange::add(int layer, int owner, int workers, const std::vector<bool>& at_home) {
  const auto enough = [&](const Instalment& last) {
    return leavesEarly() && sliceOf(last, /*part=*/0).nbytes() >= kLeastMessage;
  };
  const bool joins = !instalments_.empty() && instalments_.back().owner == owner &&
                     at_home[core::index(instalments_.back().layers.front())] == at_home[core::index(layer)] &&
                     !enough(instalments_.back());
  if (!joins) {
    instalments_.push_back({.layers = {}, .owner = owner, .workers = workers});
    always_ += at_home[core::index(layer)] ? 0 : 1;
  }
  instalments_.back().layers.push_back(layer);
  instalment_of_[core::index(layer)] = static_cast<int>(instalments_.size()) - 1;
}

// What one rank has of it: its part of split layers; of others all.
at::Tensor GradientExchange::sliceOf(const Instalment& instalment, int part) const {
  const auto& layers = instalment.layers;
  if (instalment.owner == kSplit) {
    return directions_.splitSlice(part, layers.front(), layers.back());
  }
  // They lie in ascending order, and are listed in descending.
  const at::Tensor first = directions_.slice(layers.back());
  const at::Tensor last = directions_.slice(layers.front());
  return first.as_strided({last.storage_offset() + last.numel() - first.storage_offset()}, {1}, first.storage_offset());
}

void GradientExchange::begin(bool with_those_at_home) {
  works_.clear();
  in_play_ = with_those_at_home ? instalments_.size() : always_;
  for (Instalment& instalment : instalments_) {
    instalment.missing = instalment.layers.size();
  }
  for (std::size_t i = 0; leavesEarly() && i < in_play_; ++i) {
    start(messagesOf(i, /*sends=*/false));
  }
}

std::vector<int> GradientExchange::awaited() const {
  std::vector<int> layers;
  for (std::size_t i = 0; i < in_play_; ++i) {
    layers.insert(layers.end(), instalments_[i].layers.begin(), instalments_[i].layers.end());
  }
  return layers;
}

void GradientExchange::made(int layer) {
  const int number = instalment_of_[core::index(layer)];
  if (number < 0 || core::index(number) >= in_play_) {
    return;
  }
  if (--instalments_[core::index(number)].missing == 0 && leavesEarly()) {
    start(messagesOf(core::index(number), /*sends=*/true));
  }
}

void GradientExchange::finish() {
  if (exchange_ != nullptr && exchange_->sharesMemory()) {
    gather();
  } else if (exchange_ != nullptr && !leavesEarly()) {  // of a device: all together
    Messages messages;
    for (const bool sends : {false, true}) {
      for (std::size_t i = 0; i < in_play_; ++i) {
        append(messages, messagesOf(i, sends));
      }
    }
    start(messages);
  }
  KfacExchange::wait(works_);
}

void GradientExchange::start(const Messages& messages) {
  auto started = exchange_->start(messages);
  std::move(started.begin(), started.end(), std::back_inserter(works_));
}

// What brings an instalment from its workers to the other ranks; or every rank's part to every other. Point to point:
// Gloo hands its collectives to threads of its own, which on a machine without spare cores takes longer than the
// transfer.
Messages GradientExchange::messagesOf(std::size_t number, bool sends) const {
  using core::KfacPlan;
  const Instalment& instalment = instalments_[number];
  const int tag = kfac_tags::kDirections + static_cast<int>(number);
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

void GradientExchange::gather() {
  std::vector<at::Tensor> owned(core::index(ranks_));
  for (std::size_t i = 0; i < in_play_; ++i) {
    const Instalment& instalment = instalments_[i];
    if (instalment.owner != kSplit) {  // one for each owner; its other workers have the same already
      owned[core::index(instalment.owner)] = sliceOf(instalment, 0);
    }
  }
  exchange_->gatherParts(owned);
  const auto& split = directions_.split();
  const auto end = std::find_if(split.begin(), split.end(),
                                [&](int layer) { return core::index(instalment_of_[core::index(layer)]) >= in_play_; });
  std::vector<at::Tensor> shares(core::index(ranks_));
  for (int rank = 0; end != split.begin() && rank < ranks_; ++rank) {
    shares[core::index(rank)] = directions_.splitSlice(rank, split.front(), *std::prev(end));
  }
  exchange_->gatherParts(shares);
}

}  // namespace torchext
