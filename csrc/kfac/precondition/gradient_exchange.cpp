#include "kfac/precondition/gradient_exchange.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "kfac/comm/kfac_tags.h"

namespace torchext {
namespace {

using core::KfacPlan;
using Parcels = std::vector<Communicator::Parcel>;

// From the workers of an owner's layers to the ranks that each serves.
void addOwners(const KfacPlan& plan, const Preconditioner& directions, int owner, Parcels& parcels) {
  std::vector<int> layers;
  for (int layer = 0; layer < static_cast<int>(plan.workers.size()); ++layer) {
    if (plan.workers[core::index(layer)] < plan.ranks && plan.layer_owner[core::index(layer)] == owner) {
      layers.push_back(layer);
    }
  }
  if (layers.empty()) {
    return;
  }
  const int workers = plan.workers[core::index(layers.front())];
  const at::Tensor first = directions.slice(layers.front());
  const at::Tensor last = directions.slice(layers.back());
  const at::Tensor slice =
      first.as_strided({last.storage_offset() + last.numel() - first.storage_offset()}, {1}, first.storage_offset());
  for (int from = 0; from < plan.ranks; ++from) {
    Communicator::Parcel parcel{slice, from, {}, kfac_tags::kDirections + owner};
    for (int distance = 1; distance < plan.ranks; ++distance) {
      const int to = (from + distance) % plan.ranks;
      if (!KfacPlan::isWorker(to, owner, workers, plan.ranks) &&
          KfacPlan::serverOf(to, owner, workers, plan.ranks) == from) {
        parcel.to.push_back(to);
      }
    }
    if (!parcel.to.empty()) {
      parcels.push_back(std::move(parcel));
    }
  }
}

// Every rank's part of split layers, which lie side by side, to every other.
void addShares(int ranks, const Preconditioner& directions, const std::vector<int>& layers, int tag, Parcels& parcels) {
  for (int from = 0; from < ranks && !layers.empty(); ++from) {
    Communicator::Parcel parcel{directions.splitSlice(from, layers.front(), layers.back()), from, {}, tag};
    for (int distance = 1; distance < ranks; ++distance) {
      parcel.to.push_back((from + distance) % ranks);
    }
    if (parcel.slice.numel() > 0) {
      parcels.push_back(std::move(parcel));
    }
  }
}

}  // namespace

GradientExchange::GradientExchange(const KfacPlan& plan, const Preconditioner& directions,
                                   const std::vector<bool>& at_home, Communicator* comm)
    : comm_(comm) {
  for (int owner = 0; owner < plan.ranks; ++owner) {
    addOwners(plan, directions, owner, parcels_);
  }
  const std::vector<int>& split = directions.split();
  const auto stays = std::find_if(split.begin(), split.end(), [&](int layer) { return at_home[core::index(layer)]; });
  const int tag = kfac_tags::kDirections + plan.ranks;
  addShares(plan.ranks, directions, {split.begin(), stays}, tag, parcels_);
  always_ = parcels_.size();
  addShares(plan.ranks, directions, {stays, split.end()}, tag + 1, parcels_);
}

void GradientExchange::run(bool with_those_at_home) {
  const std::size_t count = with_those_at_home ? parcels_.size() : always_;
  if (count > 0) {
    comm_->bring(Communicator::Parcels(parcels_).slice(0, count));
  }
}

}  // namespace torchext
