// Checkpoints of KfacEngine.
#include "kfac/base/engine_guards.h"
#include "kfac/engine/kfac_engine.h"

namespace torchext {

using core::FactorExchange;

std::vector<FactorState> KfacEngine::state() {
  const EngineGuards guards;
  const ReentrancyGuard guard(*this, "state_dict");
  const auto& layouts = accumulator_->layouts();
  at::Tensor mean = accumulator_->running().clone();
  if (exchange_) {
    exchange_->allReduce(mean).wait();
    mean.div_(ranks_);
  }
  std::vector<FactorState> result;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    if (plan_.factors[i].exchange == FactorExchange::kOwnersOwn && exchange_) {
      const at::Tensor own =
          accumulator_->slice(mean, layouts[i]).copy_(accumulator_->slice(accumulator_->running(), layouts[i]));
      exchange_->broadcast(own, plan_.factors[i].owner)->wait();
    }
    FactorState state{accumulator_->slice(mean, layouts[i]).clone(), {}, {}};
    FactorInverse inverse = inverses_[i];
    if (exchange_) {
      // Everyone takes the owner's, whatever it has itself.
      const int owner = plan_.factors[i].everyone_inverts ? 0 : plan_.factors[i].owner;
      const at::Tensor has = at::full({1}, inverse.defined() ? 1 : 0, at::kLong);
      exchange_->broadcast(has, owner)->wait();
      const at::TensorOptions options = accumulator_->options();
      if (has.item<std::int64_t>() == 0) {
        inverse = {};
      } else if (owner != rank_) {
        inverse.matrix = layouts[i].diagonal ? at::empty({layouts[i].dim}, options)
                                             : at::empty({layouts[i].count, layouts[i].dim, layouts[i].dim}, options);
        inverse.values = layouts[i].diagonal || options_.form == InverseForm::kInverse
                             ? at::Tensor()
                             : at::empty({layouts[i].count, layouts[i].dim}, options);
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
  const EngineGuards guards;
  const ReentrancyGuard guard(*this, "load_state_dict");
  drop(seen_backward_);
  const auto& layouts = accumulator_->layouts();
  TORCH_CHECK_VALUE(state.size() == layouts.size(), "the state has ", state.size(), " factors, the model ",
                    layouts.size());
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const bool used = worksOn(layouts[i].layer) || invertsHere(i);
    accumulator_->slice(accumulator_->running(), layouts[i]).copy_(state[i].factor);
    inverses_[i] = {};
    if (used && state[i].matrix.defined()) {
      const auto copy = [&](const at::Tensor& from) {
        return from.defined() ? from.to(accumulator_->options(), false, true).contiguous() : at::Tensor();
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
