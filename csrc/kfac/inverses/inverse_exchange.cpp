#include "kfac/inverses/inverse_exchange.h"

#include <cmath>
#include <limits>
#include <utility>

#include "core/base/check.h"
#include "kfac/comm/kfac_tags.h"

namespace torchext {
InverseExchange::InverseExchange(const core::KfacPlan& plan, const FactorAccumulator& accumulator, InverseForm form,
                                 Communicator* comm)
    : plan_(plan),
      accumulator_(accumulator),
      form_(form),
      comm_(comm),
      place_(accumulator.layouts().size(), 0),
      parcel_(place_.size(), -1) {
  std::int64_t elements = 0;
  std::vector<std::size_t> travelling;
  for (int owner = 0; owner < plan.ranks; ++owner) {
    for (std::size_t i = 0; i < place_.size(); ++i) {
      if (!plan.factors[i].everyone_inverts && workers(i) > 1 && plan.factors[i].owner == owner) {
        place_[i] = elements;
        elements += layout(i).inverseElements(form);
        parcel_[i] = static_cast<int>(travelling.size());
        travelling.push_back(i);
      }
    }
  }
  if (travelling.empty()) {
    return;
  }
  buffer_ = at::empty({elements}, accumulator.options());
  for (const std::size_t i : travelling) {
    const int owner = plan.factors[i].owner;
    const int layer_owner = plan.layer_owner[core::index(layout(i).layer)];
    Communicator::Parcel parcel{packed(i), owner, {}, kfac_tags::kInverses + static_cast<int>(i)};
    for (int distance = 1; distance < plan.ranks; ++distance) {
      const int rank = (owner + distance) % plan.ranks;
      if (core::KfacPlan::isWorker(rank, layer_owner, workers(i), plan.ranks)) {
        parcel.to.push_back(rank);
      }
    }
    parcels_.push_back(std::move(parcel));
  }
}

at::Tensor InverseExchange::packed(std::size_t number) const {
  return buffer_.narrow(0, place_[number], layout(number).inverseElements(form_));
}

void InverseExchange::pack(std::size_t number, const FactorInverse& inverse) {
  const at::Tensor to = packed(number);
  if (!inverse.defined()) {
    to.fill_(std::numeric_limits<double>::quiet_NaN());  // never made: receivers have none either
  } else if (layout(number).diagonal) {
    to.copy_(inverse.matrix);
  } else if (form_ == InverseForm::kEigen) {
    to.narrow(0, 0, inverse.values.numel()).copy_(inverse.values.flatten());
    to.narrow(0, inverse.values.numel(), inverse.matrix.numel()).copy_(inverse.matrix.flatten());
  } else {
    accumulator_.pack(inverse.matrix, layout(number), to);
  }
}

FactorInverse InverseExchange::unpacked(std::size_t number) const {
  const FactorLayout& place = layout(number);
  const at::Tensor from = packed(number);
  if (place.diagonal || form_ == InverseForm::kInverse) {
    return {accumulator_.unpacked(from, place), {}};
  }
  const std::int64_t values = place.count * place.dim;
  return {from.narrow(0, values, from.numel() - values).clone().view({place.count, place.dim, place.dim}),
          from.narrow(0, 0, values).clone().view({place.count, place.dim})};
}

void InverseExchange::expect() {
  going_.clear();
  coming_.assign(parcels_.size(), Communicator::Work());
  for (std::size_t i = 0; i < parcels_.size() && comm_->overlaps(); ++i) {
    if (parcels_[i].comesTo(comm_->rank())) {
      coming_[i] = comm_->receive(parcels_[i].slice, parcels_[i].from, parcels_[i].tag);
    }
  }
}

void InverseExchange::send(std::size_t factor_index, const FactorInverse& inverse) {
  if (!leavesHere(factor_index)) {
    return;
  }
  pack(factor_index, inverse);
  const Communicator::Parcel& parcel = parcels_[core::index(parcel_[factor_index])];
  for (std::size_t i = 0; i < parcel.to.size() && comm_->overlaps(); ++i) {
    going_.push_back(comm_->send(parcel.slice, parcel.to[i], parcel.tag));
  }
}

void InverseExchange::waitFor(std::size_t parcel) {
  if (coming_[parcel]) {
    coming_[parcel]->wait();
    coming_[parcel].reset();
  }
}

void InverseExchange::take(std::size_t factor_index, FactorInverse& inverse) {
  if (!comes(factor_index)) {
    return;
  }
  waitFor(core::index(parcel_[factor_index]));
  if (!std::isnan(packed(factor_index).select(0, 0).item<double>())) {
    inverse = unpacked(factor_index);
  }
}

void InverseExchange::finish(std::vector<FactorInverse>& inverses) {
  for (std::size_t i = 0; i < coming_.size(); ++i) {
    waitFor(i);
  }
  for (const Communicator::Work& work : going_) {
    work->wait();
  }
  going_.clear();
  if (!parcels_.empty() && !comm_->overlaps()) {
    comm_->bring(parcels_);
    takeAll(inverses);
  }
}

// With one question whether each was ever made.
void InverseExchange::takeAll(std::vector<FactorInverse>& inverses) const {
  std::vector<std::size_t> coming;
  std::vector<at::Tensor> marks;
  for (std::size_t i = 0; i < inverses.size(); ++i) {
    if (comes(i)) {
      coming.push_back(i);
      marks.push_back(packed(i).select(0, 0));
    }
  }
  if (coming.empty()) {
    return;
  }
  const at::Tensor never_made = at::stack(marks).isnan().cpu();
  for (std::size_t i = 0; i < coming.size(); ++i) {
    if (!never_made.const_data_ptr<bool>()[i]) {
      inverses[coming[i]] = unpacked(coming[i]);
    }
  }
}

}  // namespace torchext
