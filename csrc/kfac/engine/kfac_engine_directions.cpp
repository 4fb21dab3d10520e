// How a step's directions are made (and sent: gradient_exchange.h).
#include "core/base/check.h"
#include "kfac/base/scoped_timer.h"
#include "kfac/engine/kfac_engine.h"

namespace torchext {

// Begins a step's.
void KfacEngine::startDirections() {
  made_.assign(layers_.size(), false);
  const ScopedTimer timer(stats_.distribute_seconds);
  gradient_exchange_->begin(/*with_those_at_home=*/!rowsReplaceShares());
}

// This rank's part of a layer's direction, unless it is made; sends what that completes.
void KfacEngine::makeDirection(int layer) {
  if (made_[core::index(layer)]) {
    return;
  }
  made_[core::index(layer)] = true;
  if (worksOn(layer) && !takeRows(layer)) {
    const ScopedTimer timer(stats_.precondition_seconds);
    const std::size_t outputs = 2 * (layers_.size() - 1 - core::index(layer));
    const auto make = [&](int part) {
      preconditioner_->precondition(layer, part, inverses_[outputs + 1], inverses_[outputs], options_.form,
                                    options_.damping);
    };
    const int parts = preconditioner_->parts(layer);
    if (parts > 1 && takesRows(layer) && rowsReplaceShares()) {  // refused: each rank makes all of it, and sends none
      for (int part = 0; part < parts; ++part) {
        make(part);
      }
    } else {
      make(parts > 1 ? rank_ : 0);
    }
  }
  const ScopedTimer timer(stats_.distribute_seconds);
  gradient_exchange_->made(layer);
}

// Makes the rest, first what others wait for, and returns when all directions are here.
void KfacEngine::finishDirections() {
  for (const int layer : gradient_exchange_->awaited()) {
    makeDirection(layer);
  }
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    makeDirection(layer);
  }
  const ScopedTimer timer(stats_.distribute_seconds);
  gradient_exchange_->finish();
}

}  // namespace torchext
