// Checkpoints of KfacEngine.
#include "kfac/base/plain_mode.h"
#include "kfac/engine/kfac_engine.h"

namespace torchext {

using core::FactorExchange;

std::vector<FactorState> KfacEngine::state() {
  const PlainMode plain;
  const Turn turn(*this, "state_dict");
  const auto& slots = statistics_->slots();
  at::Tensor mean = statistics_->running().clone();
  if (exchange_) {
    exchange_->allReduce(mean).wait();
    mean.div_(ranks_);
  }
  std::vector<FactorState> result;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (plan_.factors[i].exchange == FactorExchange::kOwnersOwn && exchange_) {
      const at::Tensor own =
          statistics_->slice(mean, slots[i]).copy_(statistics_->slice(statistics_->running(), slots[i]));
      exchange_->broadcast(own, plan_.factors[i].owner)->wait();
    }
    FactorState state{statistics_->slice(mean, slots[i]).clone(), {}, {}};
    FactorInverse inverse = inverses_[i];
    if (exchange_) {
      // Everyone takes the owner's, whatever it has itself.
      const int owner = plan_.factors[i].everyone_inverts ? 0 : plan_.factors[i].owner;
      const at::Tensor has = at::full({1}, inverse.defined() ? 1 : 0, at::kLong);
      exchange_->broadcast(has, owner)->wait();
      const at::TensorOptions options = statistics_->options();
      if (has.item<std::int64_t>() == 0) {
        inverse = {};
      } else if (owner != rank_) {
        inverse.matrix = slots[i].diagonal ? at::empty({slots[i].dim}, options)
                                           : at::empty({slots[i].count, slots[i].dim, slots[i].dim}, options);
        inverse.values = slots[i].diagonal || options_.form == InverseForm::kInverse
                             ? at::Tensor()
                             : at::empty({slots[i].count, slots[i].dim}, options);
      }
      if (inverse.defined()) {
        exchange_->broadcast(inverse.matrix, owner)->wait();
        if (inverse.values.defined()) {
          exchange_->broadcast(inverse.values, owner)->wait();
        }
      }
    }
    if (inverse.defined()) {
      state.matrix = inverse.matrix.clone();
      state.values = inverse.values.defined() ? inverse.values.clone() : at::Tensor();
    }
    result.push_back(std::move(state));
  }
  return result;
}

void KfacEngine::load(const std::vector<FactorState>& state, std::int64_t steps, std::int64_t factor_updates) {
  const PlainMode plain;
  const Turn turn(*this, "load_state_dict");
  drop(seen_backward_);
  const auto& slots = statistics_->slots();
  TORCH_CHECK_VALUE(state.size() == slots.size(), "the state has ", state.size(), " factors, the model ", slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const bool used = worksOn(slots[i].layer) || invertsHere(i);
    statistics_->slice(statistics_->running(), slots[i]).copy_(state[i].factor);
    inverses_[i] = {};
    if (used && state[i].matrix.defined()) {
      const auto copy = [&](const at::Tensor& from) {
        return from.defined() ? from.to(statistics_->options(), false, true).contiguous() : at::Tensor();
      };
      inverses_[i] = {copy(state[i].matrix), copy(state[i].values)};
    }
  }
  rows_void_ = true;  // what was made of those that have left
  prepareRows();
  stats_.steps = steps;
  stats_.factor_updates = factor_updates;
}

}  // namespace torchext
