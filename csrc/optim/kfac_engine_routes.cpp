// How KfacEngine's results reach the ranks that need them: inverses, and directions that only some ranks compute.
#include <limits>

#include "core/check.h"
#include "optim/kfac_engine.h"
#include "optim/timed.h"

namespace torchext {
namespace {

// Tags: directions by owner, then split ones by rank, then inverses by slot.
constexpr int kFirstTag = 1;

}  // namespace

// Starts what brings directions from the workers of `owner` to the other ranks.
void KfacEngine::sendDirections(const at::Tensor& slice, int owner, int workers,
                                std::vector<KfacExchange::Work>& works) {
  using core::KfacPlan;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (KfacPlan::isWorker(rank, owner, workers, ranks_)) {
      continue;
    }
    const int from = KfacPlan::serverOf(rank, owner, workers, ranks_);
    if (from == rank_) {
      works.push_back(exchange_->send(slice, rank, kFirstTag + owner));
    } else if (rank == rank_) {
      works.push_back(exchange_->receive(slice, from, kFirstTag + owner));
    }
  }
}

void KfacEngine::packInverse(std::size_t slot) {
  const FactorSlot& place = statistics_.slots()[slot];
  const at::Tensor to = inverse_buffer_.narrow(0, inverse_place_[slot], inverseElements(place, options_.form));
  const FactorInverse& inverse = inverses_[slot];
  if (!inverse.defined()) {
    to.fill_(std::numeric_limits<double>::quiet_NaN());  // never made: receivers have none either
  } else if (place.diagonal) {
    to.copy_(inverse.matrix);
  } else if (options_.form == InverseForm::kEigen) {
    to.narrow(0, 0, inverse.values.numel()).copy_(inverse.values.flatten());
    to.narrow(0, inverse.values.numel(), inverse.matrix.numel()).copy_(inverse.matrix.flatten());
  } else {
    packFactor(inverse.matrix, place, to);
  }
}

void KfacEngine::unpackInverse(std::size_t slot) {
  const FactorSlot& place = statistics_.slots()[slot];
  const at::Tensor from = inverse_buffer_.narrow(0, inverse_place_[slot], inverseElements(place, options_.form));
  if (std::isnan(from.select(0, 0).item<double>())) {
    return;
  }
  if (place.diagonal || options_.form == InverseForm::kInverse) {
    inverses_[slot] = {unpackedFactor(from, place), {}};
    return;
  }
  const std::int64_t values = place.count * place.dim;
  inverses_[slot] = {from.narrow(0, values, from.numel() - values).clone().view({place.count, place.dim, place.dim}),
                     from.narrow(0, 0, values).clone().view({place.count, place.dim})};
}

// Inverses leave one by one as they are made, to each worker directly: what all ranks send together is no more than
// in a tree, and nothing waits in the order of collectives.
void KfacEngine::sendInverse(std::size_t slot) {
  if (inverse_place_[slot] < 0) {
    return;
  }
  const Timed timed(stats_.distribute_seconds);
  packInverse(slot);
  const FactorSlot& place = statistics_.slots()[slot];
  const at::Tensor from = inverse_buffer_.narrow(0, inverse_place_[slot], inverseElements(place, options_.form));
  const int workers = plan_.workers[core::index(place.layer)];
  for (int distance = 1; distance < workers; ++distance) {
    inverses_sent_.push_back(
        exchange_->send(from, (rank_ + distance) % ranks_, kFirstTag + 2 * ranks_ + static_cast<int>(slot)));
  }
}

void KfacEngine::receiveInverses() {
  const auto& slots = statistics_.slots();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const int owner = plan_.factors[i].owner;
    if (inverse_place_[i] >= 0 && owner != rank_ && worksOn(slots[i].layer)) {
      const at::Tensor to = inverse_buffer_.narrow(0, inverse_place_[i], inverseElements(slots[i], options_.form));
      inverses_coming_.emplace_back(i, exchange_->receive(to, owner, kFirstTag + 2 * ranks_ + static_cast<int>(i)));
    }
  }
}

void KfacEngine::takeInverses() {
  const Timed timed(stats_.distribute_seconds);
  for (const auto& [slot, work] : inverses_coming_) {
    work->wait();
    unpackInverse(slot);
  }
  inverses_coming_.clear();
  KfacExchange::wait(inverses_sent_);
}

// Every rank's share of the split directions to every other. Point to point: Gloo hands its collectives to threads of
// its own, which on a machine without spare cores takes longer than the transfer.
void KfacEngine::exchangeShares(std::vector<KfacExchange::Work>& works) {
  for (int distance = 1; distance < ranks_; ++distance) {
    const int to = (rank_ + distance) % ranks_;
    const int from = (rank_ + ranks_ - distance) % ranks_;
    const at::Tensor own = directions_->splitSlice(rank_);
    const at::Tensor others = directions_->splitSlice(from);
    if (own.numel() > 0) {
      works.push_back(exchange_->send(own, to, kFirstTag + ranks_ + rank_));
    }
    if (others.numel() > 0) {
      works.push_back(exchange_->receive(others, from, kFirstTag + ranks_ + from));
    }
  }
}

void KfacEngine::distributeDirections() {
  if (!exchange_) {
    return;
  }
  const double start = monotonicSeconds();
  std::vector<KfacExchange::Work> works;
  for (int owner = 0; owner < ranks_; ++owner) {
    at::Tensor slice;
    int workers = ranks_;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      if (plan_.workers[layer] == ranks_ || plan_.layer_owner[layer] != owner) {
        continue;
      }
      workers = plan_.workers[layer];
      const at::Tensor own = directions_->slice(static_cast<int>(layer));
      slice = !slice.defined() ? own
                               : slice.as_strided({own.storage_offset() + own.numel() - slice.storage_offset()}, {1},
                                                  slice.storage_offset());
    }
    if (slice.defined()) {
      sendDirections(slice, owner, workers, works);
    }
  }
  exchangeShares(works);
  KfacExchange::wait(works);
  stats_.distribute_seconds += monotonicSeconds() - start;
}

}  // namespace torchext
