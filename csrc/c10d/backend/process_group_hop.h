// ProcessGroupHop: the backend named "hop" (Luo et al., "Hop: Heterogeneity-Aware Decentralized Training", ASPLOS
// 2019).
//
// Every collective is ForwardedCollectives': exact, over all ranks. Models are trained through torchext.attach(): each
// worker exchanges parameters with its neighbours on a communication graph; see csrc/ddp/hop/hop_synchronizer.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/option_list.h"
#include "core/hop/communication_graph.h"
#include "core/hop/hop_mode.h"

namespace torchext {

class ProcessGroupHop : public AttachableBackend {
 public:
  // How an attached model is averaged. What the modes mean and which go together: core/hop/hop_mode.h.
  struct Options : GroupOptions {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : GroupOptions("hop", timeout) {}

    static constexpr const char* kName = "HopOptions";

    std::string graph = "ring-based";
    std::vector<std::vector<int>> neighbours = {};
    std::vector<std::vector<double>> weights = {};
    std::string order = "parallel";
    bool notify_ack = false;
    std::int64_t max_iteration_gap = 0;
    std::int64_t backup_workers = 0;
    std::int64_t staleness = 0;
    std::int64_t max_jump = 0;
    std::int64_t jump_trigger = 1;

    // Ranks compare the graph that the first three make, and not how it was given (hop_synchronizer.cpp).
    static auto list() {
      constexpr std::int64_t kMost = 1 << 20;
      return std::tuple{
          option("graph", &Options::graph,
                 R"("ring-based" (a ring, and a chord to the opposite worker), "ring", "double-ring" (even numbers of )"
                 R"(workers), "exponential" or "full".)",
                 OwnChoice{}, oneOf({"ring-based", "ring", "double-ring", "exponential", "full"})),
          option<ListOrNone>("neighbours", &Options::neighbours,
                             "Instead of ``graph``: for each rank, the ranks that it sends to; strongly connected.",
                             OwnChoice{}),
          option<ListOrNone>("weights", &Options::weights,
                             "Instead of both: ``weights[i][j]`` is the share of i's model in j's average; doubly "
                             "stochastic.",
                             OwnChoice{}),
          option("order", &Options::order,
                 R"("parallel": models travel under compute. "serial": compute, then exchange.)",
                 oneOf({"parallel", "serial"})),
          option("notify_ack", &Options::notify_ack, "The older protocol, to compare with."),
          option("max_iteration_gap", &Options::max_iteration_gap,
                 "Iterations that a worker may be ahead of an out-neighbour (tokens); 0: no limit of its own.",
                 inRange(0, kMost, "iterations ahead of an out-neighbour; 0: no tokens")),
          option("backup_workers", &Options::backup_workers, "In-neighbours that are not waited for.",
                 inRange(0, kMost, "in-neighbours that are not waited for")),
          option("staleness", &Options::staleness,
                 "Iterations that a neighbour's model may be old; newer ones count more.",
                 inRange(0, kMost, "iterations that a model may be old")),
          option("max_jump", &Options::max_jump,
                 "Iterations that a worker which is far behind jumps over at once, 2 or more; 0: none.",
                 inRange(0, kMost, "iterations of one jump; 0: none are skipped")),
          option("jump_trigger", &Options::jump_trigger,
                 "A worker that is more iterations behind than this jumps; 1 or more.",
                 inRange(1, kMost, "a lag of more iterations makes a worker jump")),
      };
    }

    // c10::ValueError with the option's name, its value and what is allowed: what can be checked without a world
    // (a user's graph as well), and what the graph of world_size ranks decides.
    void validate() const;
    void validate(int world_size) const;
    // Changes what does not fit a group that has lost or gained ranks; a user's own graph becomes "ring-based".
    void fit(int world_size);
    // NOLINTNEXTLINE(modernize-use-override): the options of torch 2.11 have none to override.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }

    core::HopMode mode() const;
    // c10::ValueError when the graph does not exist for this many ranks.
    core::CommunicationGraph graphFor(int world_size) const;
  };

  ProcessGroupHop(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options);
  ~ProcessGroupHop() override;

  const Options& hopOptions() const { return *hop_options_; }

 protected:
  // The child has the parent's options as far as they fit its size: a user's graph, or a double ring of an odd number
  // of ranks, becomes "ring-based"; backup_workers are cut to what the child's graph allows, and with the last of them
  // goes skipping.
  c10::intrusive_ptr<c10d::Backend> createChild(int rank, int size, InnerBackends inner,
                                                c10::intrusive_ptr<c10d::Backend::Options> options) override;

 private:
  c10::intrusive_ptr<Options> hop_options_;
};

}  // namespace torchext
