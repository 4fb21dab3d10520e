#include "kfac/precondition/gradient_exchange.h"

#include <utility>

#include "core/base/check.h"
#include "kfac/comm/kfac_tags.h"

namespace torchext {
namespace {

// An instalment's message takes milliseconds then on a link of a Gb/s, where starting one takes tenths of it.
constexpr std::size_t kLeastMessage = std::size_t{256} << 10;

}  // namespace

// Those of one owner in the order in which their factors come, last layer first; then those that are split.
GradientExchange::GradientExchange(const core::KfacPlan& plan, const Preconditioner& directions,
                                   const std::vector<bool>& at_home, Communicator* comm)
    : directions_(directions), ranks_(plan.ranks), instalment_of_(plan.workers.size(), -1) {
  if (comm == nullptr) {
    return;
  }
  const bool together = !comm->overlaps();
  for (int owner = 0; owner < ranks_; ++owner) {
    for (int layer = static_cast<int>(plan.workers.size()) - 1; layer >= 0; --layer) {
      const auto i = core::index(layer);
      if (plan.workers[i] < ranks_ && plan.layer_owner[i] == owner) {
        add(layer, owner, plan.workers[i], at_home[i], together);
      }
    }
  }
  for (const int layer : directions_.split()) {
    add(layer, kSplit, ranks_, at_home[core::index(layer)], together);
  }
  std::vector<Delivery::Parcel> parcels;
  for (std::size_t number = 0; number < instalments_.size(); ++number) {
    Instalment& instalment = instalments_[number];
    for (Delivery::Parcel& parcel : parcelsOf(instalment, kfac_tags::kDirections + static_cast<int>(number))) {
      if (parcel.from == comm->rank()) {
        instalment.own.push_back(parcels.size());
      }
      parcels.push_back(std::move(parcel));
    }
    instalment.parcels_end = parcels.size();
  }
  delivery_ = comm->deliver(std::move(parcels));
}

// Puts layers together until a message is worth its start-up, or all that can be; alike on all ranks.
void GradientExchange::add(int layer, int owner, int workers, bool at_home, bool joins_all) {
  const bool joins = !instalments_.empty() && instalments_.back().owner == owner && last_at_home_ == at_home &&
                     (joins_all || sliceOf(instalments_.back(), /*part=*/0).nbytes() < kLeastMessage);
  if (!joins) {
    instalments_.push_back({.layers = {}, .owner = owner, .workers = workers, .own = {}});
    always_ += at_home ? 0 : 1;
    last_at_home_ = at_home;
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

// What brings an instalment from its workers to the other ranks; or every rank's part to every other.
std::vector<Delivery::Parcel> GradientExchange::parcelsOf(const Instalment& instalment, int tag) const {
  using core::KfacPlan;
  const auto [owner, workers] = std::pair(instalment.owner, instalment.workers);
  std::vector<Delivery::Parcel> parcels;
  for (int from = 0; from < ranks_; ++from) {
    Delivery::Parcel parcel{sliceOf(instalment, owner == kSplit ? from : 0), from, {}, tag};
    for (int distance = 1; distance < ranks_; ++distance) {
      const int to = (from + distance) % ranks_;
      const bool served = owner == kSplit || (!KfacPlan::isWorker(to, owner, workers, ranks_) &&
                                              KfacPlan::serverOf(to, owner, workers, ranks_) == from);
      if (served) {
        parcel.to.push_back(to);
      }
    }
    if (!parcel.to.empty() && parcel.slice.numel() > 0) {
      parcels.push_back(std::move(parcel));
    }
  }
  return parcels;
}

void GradientExchange::begin(bool with_those_at_home) {
  in_play_ = with_those_at_home ? instalments_.size() : always_;
  for (Instalment& instalment : instalments_) {
    instalment.missing = instalment.layers.size();
  }
  if (delivery_) {
    delivery_->begin(in_play_ == 0 ? 0 : instalments_[in_play_ - 1].parcels_end);
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
  Instalment& instalment = instalments_[core::index(number)];
  if (--instalment.missing == 0) {
    for (const std::size_t parcel : instalment.own) {
      delivery_->ready(parcel);
    }
  }
}

void GradientExchange::finish() {
  if (delivery_) {
    delivery_->flush();
    delivery_->finish();
  }
}

}  // namespace torchext
