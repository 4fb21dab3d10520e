// How inverses reach the ranks that need them: by messages, or through memory where all ranks share a host's.
#include <cmath>
#include <limits>

#include "core/check.h"
#include "optim/kfac_engine.h"
#include "optim/timed.h"

namespace torchext {
at::Tensor KfacEngine::inverseBuffer(std::size_t slot) const {
  return inverse_buffer_.narrow(0, inverse_place_[slot], inverseElements(statistics_->slots()[slot], options_.form));
}

// Whether another rank sends this inverse here.
bool KfacEngine::comesHere(std::size_t slot) const {
  return inverse_place_[slot] >= 0 && plan_.factors[slot].owner != rank_ && worksOn(statistics_->slots()[slot].layer);
}

void KfacEngine::packInverse(std::size_t slot) {
  const FactorSlot& place = statistics_->slots()[slot];
  const at::Tensor to = inverseBuffer(slot);
  const FactorInverse& inverse = inverses_[slot];
  if (!inverse.defined()) {
    to.fill_(std::numeric_limits<double>::quiet_NaN());  // never made: receivers have none either
  } else if (place.diagonal) {
    to.copy_(inverse.matrix);
  } else if (options_.form == InverseForm::kEigen) {
    to.narrow(0, 0, inverse.values.numel()).copy_(inverse.values.flatten());
    to.narrow(0, inverse.values.numel(), inverse.matrix.numel()).copy_(inverse.matrix.flatten());
  } else {
    statistics_->pack(inverse.matrix, place, to);
  }
}

void KfacEngine::unpackInverse(std::size_t slot) {
  const FactorSlot& place = statistics_->slots()[slot];
  const at::Tensor from = inverseBuffer(slot);
  if (place.diagonal || options_.form == InverseForm::kInverse) {
    inverses_[slot] = {statistics_->unpacked(from, place), {}};
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
  if (throughMemory()) {
    return;
  }
  const FactorSlot& place = statistics_->slots()[slot];
  const at::Tensor from = inverseBuffer(slot);
  const int workers = plan_.workers[core::index(place.layer)];
  for (int distance = 1; distance < workers; ++distance) {
    inverses_sent_.push_back(exchange_->send(from, (rank_ + distance) % ranks_, kInversesTag + static_cast<int>(slot)));
  }
}

void KfacEngine::receiveInverses() {
  taken_ = 0;
  inverses_coming_.assign(inverses_.size(), KfacExchange::Work());
  if (throughMemory()) {
    return;
  }
  const auto& slots = statistics_->slots();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (comesHere(i)) {
      const int tag = kInversesTag + static_cast<int>(i);
      inverses_coming_[i] = exchange_->receive(inverseBuffer(i), plan_.factors[i].owner, tag);
    }
  }
}

// Waits for other ranks' inverses up to slot `end`, and makes the directions for which they come.
void KfacEngine::takeInverses(std::size_t end) {
  for (; taken_ < end; ++taken_) {
    if (comesHere(taken_)) {
      const Timed timed(stats_.distribute_seconds);
      if (!throughMemory()) {
        inverses_coming_[taken_]->wait();
      }
      if (!std::isnan(inverseBuffer(taken_).select(0, 0).item<double>())) {
        unpackInverse(taken_);
      }
    }
    if (overlaps() && taken_ % 2 == 1) {
      makeDirection(statistics_->slots()[taken_].layer);
    }
  }
}

// The rest of them.
void KfacEngine::finishInverses() {
  if (throughMemory()) {
    const Timed timed(stats_.distribute_seconds);
    gatherInverses();
  }
  takeInverses(inverses_.size());
  const Timed timed(stats_.distribute_seconds);
  KfacExchange::wait(inverses_sent_);
}

// Those that travel, all at once; they lie together by owner.
void KfacEngine::gatherInverses() {
  std::vector<at::Tensor> parts(core::index(ranks_));
  for (std::size_t slot = 0; slot < inverse_place_.size(); ++slot) {
    if (inverse_place_[slot] < 0) {
      continue;
    }
    at::Tensor& part = parts[core::index(plan_.factors[slot].owner)];
    const std::int64_t begin = part.defined() ? part.storage_offset() : inverse_place_[slot];
    part = inverse_buffer_.narrow(0, begin, inverse_place_[slot] + inverseBuffer(slot).numel() - begin);
  }
  exchange_->gatherParts(parts);
}

// The same in one go, with one question whether each was ever made.
void KfacEngine::exchangeInverses() {
  const Timed timed(stats_.distribute_seconds);
  const auto& slots = statistics_->slots();
  std::vector<KfacExchange::Message> messages;
  std::vector<std::size_t> coming;
  std::vector<at::Tensor> marks;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const int tag = kInversesTag + static_cast<int>(i);
    if (comesHere(i)) {
      messages.push_back({inverseBuffer(i), plan_.factors[i].owner, tag, /*sends=*/false});
      coming.push_back(i);
      marks.push_back(inverseBuffer(i).select(0, 0));
    } else if (inverse_place_[i] >= 0 && plan_.factors[i].owner == rank_) {
      packInverse(i);
      for (int distance = 1; distance < plan_.workers[core::index(slots[i].layer)]; ++distance) {
        messages.push_back({inverseBuffer(i), (rank_ + distance) % ranks_, tag, /*sends=*/true});
      }
    }
  }
  if (messages.empty()) {
    return;
  }
  auto works = exchange_->start(messages);
  KfacExchange::wait(works);
  if (coming.empty()) {
    return;
  }
  const at::Tensor never_made = at::stack(marks).isnan().cpu();
  for (std::size_t i = 0; i < coming.size(); ++i) {
    if (!never_made.const_data_ptr<bool>()[i]) {
      unpackInverse(coming[i]);
    }
  }
}

}  // namespace torchext
