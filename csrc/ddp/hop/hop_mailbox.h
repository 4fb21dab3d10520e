// HopMailbox: the update queue and the token queues of one Hop worker, and the lines to its neighbours that fill and
// empty them (Luo et al., ASPLOS 2019, section 4; core/hop/update_queue.h, core/hop/token_queue.h).
//
// Memory
//   One block of memory for (1 + max_ahead) models of each in-neighbour, the worker itself included, allocated once.
//   The own models in it are what the lines send from: a model is kept until it has gone to every out-neighbour, and
//   the training thread waits where one that is to be overwritten has not (a link that is (1 + max_ahead) models
//   behind). Besides, one model for each in-neighbour whose models have come too late: bytes have to go somewhere.
//   A model whose receiver has passed its iteration, as its tokens tell, is not sent at all.
// Order of messages
//   Tokens and acknowledgements overtake models that have not begun to go out; a farewell is the last of all.
//   A model that is too far ahead for the slots waits in its line until the worker has come closer.
// Sessions
//   Iterations count from 0 in each session, that is between two calls of drain(), which is the point where all workers
//   meet. Drain says farewell to all neighbours and waits for theirs; a neighbour that hears it goes on without this
//   worker: takes no tokens of it, and averages what the others sent. So workers that come to the point at different
//   iterations do not wait for each other on the way, and nothing is under way when all have come.
// Errors
//   Waits of the training thread have the group's timeout, and the error names the neighbours that were waited for.
//   The identity size = max_iteration_gap + Iter(owner) - Iter(consumer) is checked with every token that arrives; in
//   debug mode (TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL) the mode's bound on the gap with every iteration as well.
//
// Call order, at iteration k: ownBlock(k), [fill it], publish(k) -> take(), [read], release() -> enter(k + 1).
// Threads: the functions of the first part are the training thread's; stats() may come from any.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/hop/communication_graph.h"
#include "core/hop/hop_mode.h"
#include "core/hop/token_queue.h"
#include "core/hop/update_queue.h"
#include "ddp/hop/hop_line.h"
#include "ddp/hop/hop_model.h"
#include "ddp/hop/hop_stats.h"

namespace torchext {

struct HopSetup {
  core::CommunicationGraph graph;  // of more than one rank
  core::HopMode mode;
  std::size_t model_bytes = 0;
  std::uint64_t digest = 0;  // the same on all ranks
  int channel = 0;           // of the group
};

class HopMailbox final : private HopLineOwner {
 public:
  HopMailbox(c10::intrusive_ptr<AttachableBackend> group, HopSetup setup);
  ~HopMailbox() override;

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
  struct Neighbour {
    bool sends = false;            // an in-neighbour: its models come, tokens and acknowledgements go
    bool receives = false;         // an out-neighbour
    std::optional<int> gap_bound;  // of an in-neighbour: that can be asserted from its messages
    std::optional<core::TokenQueue> tokens;
    std::int64_t acked = -1;              // its last acknowledgement
    std::int64_t newest = -1;             // tag of its last model
    bool storing = false;                 // a model of it goes to a slot
    bool left = false;                    // has said farewell in this session,
    bool gone = false;                    //   for good
    std::vector<std::byte> scratch;       // where models go that came too late
    std::deque<core::HopMessage> urgent;  // tokens and acknowledgements to send
    std::deque<std::int64_t> models;      // tags to send
    std::optional<core::HopMessage::Kind> farewell;
    bool farewell_sent = false;
    std::condition_variable to_send;
    std::unique_ptr<HopLine> line;
  };

  std::optional<Outgoing> next(int peer) override;
  void sent(int peer, const core::HopMessage& header) override;
  std::byte* destination(int peer, const core::HopMessage& header) override;
  bool received(int peer, const core::HopMessage& header) override;
  void failed(int peer, std::exception_ptr error) override;
  std::uint64_t modelBytes() const override { return setup_.model_bytes; }
  std::uint64_t digest() const override { return setup_.digest; }

  // All with mutex_ held.
  void beginSession();
  void fail(const std::exception_ptr& error);
  void dropPassed(Neighbour& to);
  void leftBy(int peer, Neighbour& from, bool for_good);
  void tokensFrom(int peer, Neighbour& from, const core::HopMessage& header);
  void checkSession(int peer, const core::HopMessage& header) const;
  core::HopMessage header(core::HopMessage::Kind kind, std::int64_t tag) const;
  void post(Neighbour& to, const core::HopMessage& message);
  std::byte* block(int slot) const;
  int& sending(std::int64_t tag) { return sending_[static_cast<std::size_t>(tag % (max_ahead_ + 1))]; }
  template <class Ready, class Missing>
  void waitUntil(std::unique_lock<std::mutex>& lock, const char* range, double& spent_ms, Ready ready, Missing missing);
  std::string ranks(const std::function<bool(const Neighbour&)>& which) const;

  const c10::intrusive_ptr<AttachableBackend> group_;
  const HopSetup setup_;
  const int rank_;
  const int max_ahead_;
  const bool debug_;
  const at::Tensor memory_;

  mutable std::mutex mutex_;             // guards what follows
  std::condition_variable changed_;      // the training thread waits here,
  std::condition_variable slots_free_;   //   receiving threads here, sending ones at their neighbour
  std::map<int, Neighbour> neighbours_;  // by rank; the map itself never changes
  std::unique_ptr<core::UpdateQueue> queue_;
  std::vector<int> sending_;  // own models: lines that still send from them, by slot
  std::uint64_t session_ = 0;
  std::int64_t iteration_ = 0;                      // in this session
  std::chrono::steady_clock::time_point progress_;  // when the last message came, or draining began
  bool draining_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  HopStats stats_;

  std::uint64_t abort_callback_ = 0;
};

}  // namespace torchext
