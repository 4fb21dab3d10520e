// ProcessGroupHop: the backend named "hop" (Luo et al., "Hop: Heterogeneity-Aware Decentralized Training", ASPLOS
// 2019).
//
// Every collective is DelegatingBackend's: exact, over all ranks. Models are trained through torchext.attach(): each
// worker exchanges parameters with its neighbours on a communication graph; see csrc/ddp/hop/hop_synchronizer.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "core/hop/communication_graph.h"
#include "core/hop/hop_mode.h"

namespace torchext {

class ProcessGroupHop : public AttachableBackend {
 public:
  // How an attached model is averaged. What the modes mean and which go together: core/hop/hop_mode.h.
  struct Options : GroupOptions {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : GroupOptions("hop", timeout) {}

    // The graph: a name, or a user's own: neighbours[rank] are the ranks it sends to, or weights[from][to] is the
    // share of from's model in to's average, doubly stochastic. One of the two at most; then graph is not looked at.
    std::string graph = "ring-based";  // ring-based | ring | double-ring | exponential | full
    std::vector<std::vector<int>> neighbours = {};
    std::vector<std::vector<double>> weights = {};
    std::string order = "parallel";      // "parallel": send, and compute meanwhile; "serial": compute, then exchange
    bool notify_ack = false;             // the older protocol, for comparison
    std::int64_t max_iteration_gap = 0;  // to an out-neighbour; 0: no tokens
    std::int64_t backup_workers = 0;     // in-neighbours that are not waited for
    std::int64_t staleness = 0;          // iterations that a neighbour's model may be old
    std::int64_t max_jump = 0;           // iterations of one jump; 0: none are skipped
    std::int64_t jump_trigger = 1;       // more iterations behind than this makes a worker jump

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
