#include "kfac/inverses/inverse_exchange.h"

#include <cmath>
#include <limits>

#include "core/base/check.h"
#include "kfac/comm/kfac_tags.h"

namespace torchext {
namespace {

int tagOf(std::size_t factor_index) { return kfac_tags::kInverses + static_cast<int>(factor_index); }

}  // namespace

InverseExchange::InverseExchange(const core::KfacPlan& plan, const FactorAccumulator& accumulator, InverseForm form,
                                 KfacExchange* exchange)
    : plan_(plan),
      accumulator_(accumulator),
      form_(form),
      exchange_(exchange),
      rank_(exchange != nullptr ? exchange->rank() : 0),
      place_(accumulator.layouts().size(), -1) {
  std::int64_t elements = 0;
  for (int owner = 0; owner < plan.ranks; ++owner) {
    for (std::size_t i = 0; i < place_.size(); ++i) {
      if (!plan.factors[i].everyone_inverts && workers(i) > 1 && plan.factors[i].owner == owner) {
        place_[i] = elements;
        elements += inverseElements(layout(i), form);
      }
    }
  }
  if (elements > 0) {
    buffer_ = at::empty({elements}, accumulator.options());
  }
}

at::Tensor InverseExchange::packed(std::size_t number) const {
  return buffer_.narrow(0, place_[number], inverseElements(layout(number), form_));
}

bool InverseExchange::comesHere(std::size_t number) const {
  const int layer = layout(number).layer;
  const int layer_owner = plan_.layer_owner[core::index(layer)];
  return place_[number] >= 0 && plan_.factors[number].owner != rank_ &&
         core::KfacPlan::isWorker(rank_, layer_owner, workers(number), plan_.ranks);
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
  coming_.assign(place_.size(), KfacExchange::Work());
  for (std::size_t i = 0; i < place_.size(); ++i) {
    if (comesHere(i) && !exchange_->sharesMemory()) {
      coming_[i] = exchange_->receive(packed(i), plan_.factors[i].owner, tagOf(i));
    }
  }
}

// To each worker directly: what all ranks send together is no more than in a tree, and nothing waits in the order of
// collectives.
void InverseExchange::send(std::size_t factor_index, const FactorInverse& inverse) {
  if (!leavesHere(factor_index)) {
    return;
  }
  pack(factor_index, inverse);
  if (exchange_->sharesMemory()) {
    return;
  }
  for (int distance = 1; distance < workers(factor_index); ++distance) {
    sent_.push_back(exchange_->send(packed(factor_index), (rank_ + distance) % plan_.ranks, tagOf(factor_index)));
  }
}

void InverseExchange::gather() {
  std::vector<at::Tensor> parts(core::index(plan_.ranks));
  for (std::size_t i = 0; i < place_.size(); ++i) {
    if (place_[i] < 0) {
      continue;
    }
    at::Tensor& part = parts[core::index(plan_.factors[i].owner)];
    const std::int64_t begin = part.defined() ? part.storage_offset() : place_[i];
    part = buffer_.narrow(0, begin, place_[i] + packed(i).numel() - begin);
  }
  exchange_->gatherParts(parts);
}

void InverseExchange::take(std::size_t factor_index, FactorInverse& inverse) {
  if (!comesHere(factor_index)) {
    return;
  }
  if (!exchange_->sharesMemory()) {
    coming_[factor_index]->wait();
  }
  if (!std::isnan(packed(factor_index).select(0, 0).item<double>())) {
    inverse = unpacked(factor_index);
  }
}

void InverseExchange::exchange(std::vector<FactorInverse>& inverses) {
  std::vector<KfacExchange::Message> messages;
  std::vector<std::size_t> coming;
  std::vector<at::Tensor> marks;
  for (std::size_t i = 0; i < place_.size(); ++i) {
    if (comesHere(i)) {
      messages.push_back({packed(i), plan_.factors[i].owner, tagOf(i), /*sends=*/false});
      coming.push_back(i);
      marks.push_back(packed(i).select(0, 0));
    } else if (leavesHere(i)) {
      pack(i, inverses[i]);
      for (int distance = 1; distance < workers(i); ++distance) {
        messages.push_back({packed(i), (rank_ + distance) % plan_.ranks, tagOf(i), /*sends=*/true});
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
      inverses[coming[i]] = unpacked(coming[i]);
    }
  }
}

}  // namespace torchext
