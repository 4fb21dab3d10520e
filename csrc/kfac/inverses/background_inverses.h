// BackgroundInverses: a thread that waits for factors on their way and inverts them, while the backward pass waits for
// gradients to be averaged.
//
// A step's runs of factors are followed in the order in which they leave (background_pipeline.h); each names the
// factors that can be inverted once it has come. Whoever owns the object collects what it needs. What is collected is
// as good as made by the owner: a step that is left out drops it unseen.
//
// Threads: the owner's calls under a lock of its own; one thread that owns all it uses, without the interpreter lock.
// Between follow() and end() nobody else writes the factors that have left. Waits end when the run's own wait does:
// with the group's timeout or failure.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "kfac/base/background_worker.h"
#include "kfac/comm/communicator.h"
#include "kfac/inverses/factor_inverter.h"

namespace torchext {

class BackgroundInverses {
 public:
  // watch: as Communicator::watch().
  explicit BackgroundInverses(std::function<void()> watch) : runs_("tx_inverses", std::move(watch)) {}

  // The step's next run, and the indices of factors that are, with their layer's other one, in it or in earlier ones.
  // Never blocks. All runs of a step have the same inverter and damping.
  void follow(Communicator::Sum run, std::vector<std::size_t> factor_indices, const FactorInverter& inverter,
              double damping);
  std::size_t runs() const;
  // Until the first `runs` have come.
  void waitForRuns(std::size_t runs);
  // A factor's inverse; the first time what went wrong with it is added to failures. Factors that follow() did not name
  // must not be asked for.
  FactorInverse collect(std::size_t factor_index, InverseFailures& failures);
  // Drops what was made, and returns when the thread is at rest: the factors' memory may be written again.
  void end();

 private:
  struct Made {
    FactorInverse inverse;
    InverseFailures failures;
  };
  BackgroundWorker<Made> runs_;
};

}  // namespace torchext
