// HopExchange leads an attached model through the iterations of Hop: it goes out, becomes the average with its
// neighbours', and comes to the next iteration, or to a later one if its worker is late.
//
// An iteration, and what each part asks of the mailbox (hop_mailbox.h)
//   publish()  packs the model into the mailbox's memory, from where it goes to the neighbours.
//   average()  takes what the mode asks for, and writes the weighted sum into the model.
//   advance()  chooses the next iteration; a worker that is late skips some.
//   enter()    takes the tokens on the way there. One who skips averages with what has come for the last iteration that
//              is skipped.
// Sessions
//   drain() ends one where all workers meet, and the next begins with iteration 0.
// Errors
//   What fails in the middle of an exchange leaves others waiting for it: they are told the reason. What a signal's
//   handler raised may have ended a wait in enter(): training may go on after it, with another call.
//
// Threads: the training thread. drain() with a limit, stop() and stats() may come from another when training is over.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/backend/attachable_backend.h"
#include "ddp/common/tensors_in_place.h"
#include "ddp/hop/hop_mailbox.h"
#include "ddp/hop/hop_model.h"
#include "ddp/hop/hop_stats.h"
#include "ddp/hop/hop_worker_state.h"

namespace torchext {

class HopExchange final {
 public:
  // model, tensors: the same tensors; they outlive this.
  HopExchange(const c10::intrusive_ptr<AttachableBackend>& group, const HopModel& model, TensorsInPlace& tensors,
              const HopSetup& setup);

  bool isPublished() const { return own_block_ != nullptr; }
  void publish() { publish(true); }
  void average();
  // Returns how many iterations are skipped.
  std::int64_t advance();
  // Nothing where the iteration has been entered.
  void enter();

  // HopMailbox::drain().
  bool drain(bool finally, std::optional<std::chrono::milliseconds> limit = std::nullopt);
  // HopMailbox::stop().
  void stop() { mailbox_.stop(); }
  void checkUsable() const { mailbox_.checkUsable(); }
  // All but the steps and the distance of consensus.
  HopStats stats() const;

 private:
  // On the way to tag_: over skipped iterations to the one that is averaged in passing, or to the next one to compute.
  enum class Entering { kNo, kJump, kNext };

  void publish(bool send);
  template <class Body>
  void orTellAll(Body body);

  const c10::intrusive_ptr<AttachableBackend> group_;
  const HopModel& model_;
  TensorsInPlace& tensors_;
  const core::HopMode mode_;
  const std::vector<at::Tensor> transfer_buffers_;  // of the model
  HopMailbox mailbox_;

  std::int64_t tag_ = 0;                  // of the iteration in this session
  const std::byte* own_block_ = nullptr;  // what was published for tag_; null: nothing was
  FlightRecord flight_;                   // of what was published
  Entering entering_ = Entering::kNo;
  std::int64_t skipped_ = 0;
  double copy_ms_ = 0;
};

}  // namespace torchext
