#include "kfac/inverses/background_inverses.h"

#include <memory>
#include <utility>

namespace torchext {

void BackgroundInverses::follow(Communicator::Sum run, std::vector<std::size_t> factor_indices,
                                const FactorInverter& inverter, double damping) {
  const auto invert = [inverter, damping](std::size_t factor_index) {
    const std::size_t first = factor_index & ~std::size_t{1};
    const auto dampings = inverter.dampings(first, {inverter.traces(first), inverter.traces(first + 1)}, damping);
    Made result;
    result.inverse = inverter.invert(factor_index, dampings.at(factor_index - first), result.failures);
    return result;
  };
  // std::function copies: the sum, which is waited for once, is shared.
  runs_->follow({[sum = std::make_shared<Communicator::Sum>(std::move(run))] { sum->wait(); },
                 std::move(factor_indices), invert});
}

std::size_t BackgroundInverses::runs() const { return runs_->followed(); }

void BackgroundInverses::waitForRuns(std::size_t runs) { runs_->waitForRuns(runs); }

FactorInverse BackgroundInverses::collect(std::size_t factor_index, InverseFailures& failures) {
  return runs_->use(factor_index, [&](Made& made) {
    const InverseFailures counted = std::exchange(made.failures, {});
    failures.retried += counted.retried;
    failures.kept += counted.kept;
    return made.inverse;
  });
}

void BackgroundInverses::end() { runs_->end(); }

}  // namespace torchext
