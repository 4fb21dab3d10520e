// HopNeighbour serves the line to one neighbour of a Hop worker: what goes out, where models come in, and its tokens.
//
// Order of messages
//   Tokens and acknowledgements overtake models that have not begun to go out; a farewell is the last of all.
//   A model whose receiver has passed its iteration, as its tokens tell, is not sent at all.
//   A model that is too far ahead for the slots waits in its line until the worker has come closer. One that comes too
//   late goes to memory of its own: bytes have to go somewhere.
// Errors
//   The identity size = max_iteration_gap + Iter(owner) - Iter(consumer) is checked with every token that arrives; in
//   debug mode (TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL) the mode's bound on the gap with every iteration as well.
//
// Threads: the functions of the first part are the training thread's, with the state's lock held, but for start() and
// stop(). Those of HopLineOwner run on the line's own threads, and take the lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <vector>

#include "core/hop/hop_messages.h"
#include "core/hop/token_queue.h"
#include "ddp/hop/hop_line.h"
#include "ddp/hop/hop_worker_state.h"

namespace torchext {

class HopNeighbour final : private HopLineOwner {
 public:
  // The state outlives this object.
  HopNeighbour(HopWorkerState& state, int peer);

  // Without the lock. stop(): safe twice.
  void start() { line_.start(); }
  void stop() { line_.stop(); }

  void beginSession();
  // An out-neighbour that is still here: the own models go to it.
  bool takesModels() const { return receives_ && !left_; }
  void sendModel(std::int64_t tag);
  // To an in-neighbour: its model of iteration `tag` has been taken; `tag` has been entered, `count` iterations on.
  void acknowledge(std::int64_t tag);
  void giveTokens(std::int64_t tag, int count);
  // Of an out-neighbour's.
  void takeTokens(int count);
  void sayFarewell(core::HopMessage::Kind kind);

  // Whether this worker waits for a model of iteration `oldest` or later.
  bool owesModel(std::int64_t oldest) const { return sends_ && !left_ && newest_ < oldest; }
  bool owesAcknowledgement(std::int64_t tag) const { return receives_ && !left_ && acked_ < tag; }
  // Those that it owns and this worker takes; null: without tokens, or when it has left.
  const core::TokenQueue* tokens() const { return tokens_ && !tokens_->released() ? &*tokens_ : nullptr; }
  // Of an in-neighbour that is still here: how far ahead this worker is in iteration `tag`, as its messages tell.
  std::optional<std::int64_t> gapAt(std::int64_t tag) const;
  bool left() const { return left_; }
  // Both have said farewell in this session.
  bool parted() const { return left_ && farewell_sent_; }

 private:
  std::optional<Outgoing> next() override;
  void sent(const core::HopMessage& header) override;
  std::byte* destination(const core::HopMessage& header) override;
  bool received(const core::HopMessage& header) override;
  void failed(std::exception_ptr error) override;
  std::uint64_t modelBytes() const override { return state_.setup.model_bytes; }
  std::uint64_t digest() const override { return state_.setup.digest; }

  // All with the lock held.
  void post(const core::HopMessage& message);
  void dropPassed();
  void leave(bool for_good);
  void receiveTokens(const core::HopMessage& header);
  void checkSession(const core::HopMessage& header) const;

  HopWorkerState& state_;
  const int peer_;
  const bool sends_;                    // an in-neighbour: its models come, tokens and acknowledgements go
  const bool receives_;                 // an out-neighbour
  const std::optional<int> gap_bound_;  // in debug mode, of an in-neighbour: that can be asserted from its messages

  // Guarded by the state's lock.
  std::condition_variable& to_send_;  // the state's, for this neighbour
  std::optional<core::TokenQueue> tokens_;
  std::int64_t acked_ = -1;              // its last acknowledgement
  std::int64_t newest_ = -1;             // tag of its last model
  bool storing_ = false;                 // a model of it goes to a slot
  bool left_ = false;                    // has said farewell in this session,
  bool gone_ = false;                    //   for good
  std::vector<std::byte> scratch_;       // where models go that came too late
  std::deque<core::HopMessage> urgent_;  // tokens and acknowledgements to send
  std::deque<std::int64_t> models_;      // tags to send
  std::optional<core::HopMessage::Kind> farewell_;
  bool farewell_sent_ = false;

  HopLine line_;  // last: its threads end before what they use
};

}  // namespace torchext
