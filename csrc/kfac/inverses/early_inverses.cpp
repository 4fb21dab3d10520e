#include "kfac/inverses/early_inverses.h"

#include <utility>

namespace torchext {

void EarlyInverses::follow(KfacExchange::Sum run, std::vector<std::size_t> slots, const FactorInverter& inverter,
                           double damping) {
  const auto invert = [inverter, damping](std::size_t slot) {
    const std::size_t first = slot & ~std::size_t{1};
    const auto dampings = inverter.dampings(first, {inverter.traces(first), inverter.traces(first + 1)}, damping);
    Made result;
    result.inverse = inverter.invert(slot, dampings.at(slot - first), result.failures);
    return result;
  };
  // std::function copies: the sum, which is waited for once, is shared.
  runs_->follow(
      {[sum = std::make_shared<KfacExchange::Sum>(std::move(run))] { sum->wait(); }, std::move(slots), invert});
}

std::size_t EarlyInverses::runs() const { return runs_->followed(); }

void EarlyInverses::waitForRuns(std::size_t runs) { runs_->waitForRuns(runs); }

FactorInverse EarlyInverses::collect(std::size_t slot, InverseFailures& failures) {
  return runs_->use(slot, [&](Made& made) {
    const InverseFailures counted = std::exchange(made.failures, {});
    failures.retried += counted.retried;
    failures.kept += counted.kept;
    return made.inverse;
  });
}

void EarlyInverses::end() { runs_->end(); }

}  // namespace torchext
