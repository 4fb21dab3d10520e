// HopMailbox leads a Hop worker's training thread through its iterations (Luo et al., ASPLOS 2019, section 4).
//
// It hands out memory for models, and waits for those of the neighbours and for their tokens.
//
// An iteration, and the class that each part of it passes
//   ownBlock(k), [fill it]  HopSlots has the memory; waits where the model before it there has not gone to every
//                           out-neighbour (a link that is (1 + max_ahead) models behind).
//   publish(k)              HopNeighbour queues the model for its line (hop_line.h).
//   take(), [read]          The update queue of HopSlots says which models are averaged.
//   release()               HopNeighbour acknowledges.
//   enter(k + 1)            HopNeighbour takes tokens and gives them.
// Sessions
//   Iterations count from 0 in each session, that is between two calls of drain(), which is the point where all workers
//   meet. Drain says farewell to all neighbours and waits for theirs; a neighbour that hears it goes on without this
//   worker: takes no tokens of it, and averages what the others sent. So workers that come to the point at different
//   iterations do not wait for each other on the way, and nothing is under way when all have come.
// Errors
//   Waits of the training thread have the group's timeout, and the error names the neighbours that were waited for.
//
// Threads: the training thread; stats() may come from any. The lines' threads are the neighbours' (hop_neighbour.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ddp/hop/hop_model.h"
#include "ddp/hop/hop_neighbour.h"
#include "ddp/hop/hop_stats.h"
#include "ddp/hop/hop_worker_state.h"

namespace torchext {

class HopMailbox final {
 public:
  HopMailbox(c10::intrusive_ptr<AttachableBackend> group, HopSetup setup);
  ~HopMailbox();
  HopMailbox(const HopMailbox&) = delete;
  HopMailbox& operator=(const HopMailbox&) = delete;

  // Where the own model of iteration `tag` is to be packed; waits until the one before it there has gone out.
  std::byte* ownBlock(std::int64_t tag);
  // The own model of the iteration is packed: it may be averaged here and, if send is set, goes out.
  void publish(std::int64_t tag, bool send);
  // Waits for what the mode asks for. The blocks stay until release().
  std::vector<HopModel::Input> take();
  void release();
  // Iterations behind the out-neighbour that is furthest behind, as far as its tokens have arrived; 0 without tokens.
  int lag() const;
  // Goes to iteration `tag`, one or more further: waits for tokens or acknowledgements, and gives tokens.
  void enter(std::int64_t tag);

  // See "sessions". finally: no session will follow. Fails when no neighbour shows any progress for the group's
  // timeout; with a limit it gives up after that, returns false, and no session may follow.
  bool drain(bool finally, std::optional<std::chrono::milliseconds> limit = std::nullopt);
  // Ends the lines at once, and with an error a wait during which a signal's handler has called it. Safe twice.
  void stop();

  void checkUsable() const;  // rethrows what broke a line
  HopStats stats() const;

 private:
  struct NotStarted {};
  HopMailbox(NotStarted, c10::intrusive_ptr<AttachableBackend> group, HopSetup setup);

  using Which = std::function<bool(const HopNeighbour&)>;

  // All with the state's mutex held.
  void beginSession();
  template <class Ready, class Missing>
  void waitUntil(std::unique_lock<std::mutex>& lock, const char* range, double& spent_ms, Ready ready, Missing missing);
  void timeOut(std::unique_lock<std::mutex>& lock, const std::string& text);
  bool none(const Which& which) const;
  std::string ranks(const Which& which) const;

  HopWorkerState state_;
  std::map<int, HopNeighbour> neighbours_;  // by rank; the map itself never changes
  std::uint64_t failure_callback_ = 0;
};

}  // namespace torchext
