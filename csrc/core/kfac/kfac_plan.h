// KfacPlan says who computes and sends what in distributed K-FAC. Every published strategy is a preset of this one
// type.
//
// A layer has two factors, A (inputs) and G (output gradients). For each factor a plan says how the ranks' shares come
// together, and who inverts; for each layer, who preconditions its gradient.
//
//   strategy   factors are           inverted by                    gradients are preconditioned by
//   spd        all-reduced           all where that is cheaper than  all ranks
//                                    a broadcast, else the rank with
//                                    the least load, which broadcasts
//   pad        reduced to the owner  the owner: consecutive blocks   all ranks, or the owner of both factors where
//                                    of equal cost, over links in     sending the gradient costs less
//                                    several rounds
//   comm-opt   all-reduced           the layer's owner, broadcasts   all ranks
//   mem-opt    all-reduced           the layer's owner               the owner, which broadcasts the result
//   hybrid     all-reduced           the layer's owner, to a         those workers; each sends the result to the ranks
//                                    fraction of the ranks           that it serves
//   dp         the owner's own       the layer's owner               the owner, which broadcasts the result
//   d-kfac     all-reduced, each     all ranks                       all ranks
//              update, unfused
//
// comm-opt, mem-opt and hybrid are KAISA's (Pauloski et al., SC 2021), dp is DP-KFAC (arXiv 2206.15143) and changes the
// maths: all others give the same result. Owners under dp follow from the sizes of factors alone, so that every run has
// the same ones, whatever it measured. d-kfac is the plain algorithm that the papers compare with.
//
// Pure: the same arguments give the same plan on every rank. Errors: std::invalid_argument.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "core/kfac/kfac_costs.h"
#include "core/transport/alpha_beta.h"

namespace torchext::core {

enum class KfacStrategy { kSpd, kPad, kCommOpt, kMemOpt, kHybrid, kDp, kDkfac, kAuto };
KfacStrategy parseKfacStrategy(const std::string& name);
const char* kfacStrategyName(KfacStrategy strategy);

enum class FactorExchange { kAllReduce, kReduceToOwner, kOwnersOwn };

// A factor, in the order of sending: the factors of one layer are neighbours.
struct FactorTask {
  int layer = 0;
  std::size_t dim = 1;            // rows of one matrix
  std::size_t count = 1;          // matrices: the groups of a grouped convolution
  std::size_t factor_bytes = 0;   // of the packed triangles
  std::size_t inverse_bytes = 0;  // of what a rank needs to precondition
  bool diagonal = false;          // inverted by a division
};

struct KfacCosts {
  AlphaBeta all_reduce;
  AlphaBeta broadcast;  // also of a reduce
  InversionCost inversion;
  // Of what ranks of one host bring each other through its memory, by the bytes of all, in one go; all_reduce and
  // broadcast are made of it then. None: things travel as messages.
  std::optional<AlphaBeta> sharing = {};
  double inverseSeconds(const FactorTask& task) const;
};

struct FactorPlan {
  FactorExchange exchange = FactorExchange::kAllReduce;
  int owner = 0;
  bool everyone_inverts = true;

  bool invertedBy(int rank) const { return everyone_inverts || owner == rank; }
};

struct KfacPlan {
  KfacStrategy strategy = KfacStrategy::kSpd;
  int ranks = 1;
  std::vector<FactorPlan> factors;  // [task]
  // [layer] how many ranks precondition: `ranks`, or fewer, starting with the owner of the layer (see worker()).
  std::vector<int> workers;
  std::vector<int> layer_owner;  // [layer] of its factors, where workers is below ranks
  std::vector<int> fusion_ends;  // buckets of tasks that travel together
  // Where all ranks precondition, each computes a share of every direction's columns, and they are brought together:
  // chosen where that costs less than computing all of it everywhere.
  bool split_directions = false;

  bool preconditions(int rank, int layer) const {
    const auto i = static_cast<std::size_t>(layer);
    return isWorker(rank, layer_owner[i], workers[i], ranks);
  }
  // Whether `rank` preconditions what `owner` owns, where `count` ranks do: the owner and those after it.
  static bool isWorker(int rank, int owner, int count, int ranks) { return distance(rank, owner, ranks) < count; }
  // The worker that serves a rank which is none.
  static int serverOf(int rank, int owner, int count, int ranks) {
    return (owner + distance(rank, owner, ranks) % count) % ranks;
  }
  static int distance(int rank, int owner, int ranks) { return (rank - owner + ranks) % ranks; }
};

struct KfacPlanInput {
  std::vector<FactorTask> tasks;
  std::vector<std::size_t> gradient_bytes;  // [layer]
  std::vector<double> precondition;         // [layer] seconds on one rank; empty: as if it cost nothing
  // [layer] may be made of the rows of all ranks' batches, in steps without an update, where all ranks have the
  // inverses of all such layers. Whether that will be is not known yet: pad pays a little for it. Empty: none.
  std::vector<bool> of_rows;
  KfacCosts costs;
  int ranks = 1;
  int steps_per_inverse = 10;        // steps from one update of the inverses to the next
  double worker_fraction = 0.5;      // of hybrid, (0, 1]
  std::size_t bucket_cap_bytes = 0;  // buckets are no longer than that (a longer factor is alone); 0: no limit
};

// The preset, or for kAuto that of spd, pad, comm-opt, mem-opt, hybrid with the least predictedSeconds.
KfacPlan makeKfacPlan(KfacStrategy strategy, const KfacPlanInput& input);

// Seconds of communication, inversion and preconditioning, nothing overlapped: what plans are compared by.
struct KfacPrediction {
  double exchange = 0;      // of an update of the inverses
  double invert = 0;        // the busiest rank's, of an update
  double distribute = 0;    // inverses to the ranks that need them, of an update
  double precondition = 0;  // the busiest rank's, of a step
  double gradients = 0;     // preconditioned gradients, of a step
  double perStep(int steps_per_inverse) const {
    return (exchange + invert + distribute) / static_cast<double>(steps_per_inverse) + precondition + gradients;
  }
};
KfacPrediction predictKfac(const KfacPlan& plan, const KfacPlanInput& input);

}  // namespace torchext::core
