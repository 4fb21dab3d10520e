// What the training thread does with its mailbox in an iteration. Between iterations: hop_mailbox_session.cpp. The
// lines' side: hop_mailbox_lines.cpp.
#include "ddp/hop/hop_mailbox.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include "c10d/threads/interruptible_wait.h"
#include "ddp/common/elapsed.h"

namespace torchext {
namespace {

using core::HopMessage;

}  // namespace

std::byte* HopMailbox::block(int slot) const {
  return static_cast<std::byte*>(memory_.mutable_data_ptr()) + static_cast<std::size_t>(slot) * setup_.model_bytes;
}

HopMessage HopMailbox::header(HopMessage::Kind kind, std::int64_t tag) const {
  HopMessage message;
  message.kind = kind;
  message.sender = rank_;
  message.session = session_;
  message.tag = tag;
  message.bytes = kind == HopMessage::kModel ? setup_.model_bytes : 0;
  message.digest = setup_.digest;
  return message;
}

template <class Ready, class Missing>
void HopMailbox::waitUntil(std::unique_lock<std::mutex>& lock, const char* range, double& spent_ms, Ready ready,
                           Missing missing) {
  if (!error_ && !ready()) {
    RECORD_FUNCTION(range, std::vector<c10::IValue>{});
    const auto start = Clock::now();
    const auto timeout = group_->timeout();
    const bool in_time = waitInterruptibly(changed_, lock, start + timeout, [&] { return error_ || ready(); });
    ++stats_.waits;
    spent_ms += millisecondsSince(start);
    if (!in_time) {
      const std::string text = c10::str("rank ", rank_, " waited ", timeout.count(), " ms for ", missing());
      lock.unlock();
      group_->health()->poison(rank_, text);  // its callback sets error_
      lock.lock();
      fail(group_->health()->failureOf({.name = "training"}));
    }
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

std::byte* HopMailbox::ownBlock(std::int64_t tag) {
  std::unique_lock<std::mutex> lock(mutex_);
  waitUntil(
      lock, "torchext::hop::wait_send", stats_.send_wait_ms, [&] { return sending(tag) == 0; },
      [&] {
        return c10::str("its model of iteration ", tag - max_ahead_ - 1, " to go out to ",
                        ranks([](const Neighbour& to) { return to.receives && !to.left; }));
      });
  return block(queue_->slotOf(rank_, tag));
}

void HopMailbox::publish(std::int64_t tag, bool send) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (queue_->admit(rank_, tag) != core::Admission::kStore) {
    C10_THROW_ERROR(DistBackendError, c10::str("hop: the own model of iteration ", tag, " has no slot"));
  }
  queue_->enqueue(rank_, tag);
  if (!send) {
    return;
  }
  for (auto& [peer, to] : neighbours_) {
    if (to.receives && !to.left) {
      to.models.push_back(tag);
      ++sending(tag);
      to.to_send.notify_one();
    }
  }
}

std::vector<HopModel::Input> HopMailbox::take() {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::int64_t oldest = iteration_ - setup_.mode.staleness;
  waitUntil(
      lock, "torchext::hop::wait_models", stats_.model_wait_ms, [this] { return queue_->ready(); },
      [&] {
        return c10::str("the model of iteration ", iteration_, " from ",
                        ranks([&](const Neighbour& from) { return from.sends && !from.left && from.newest < oldest; }));
      });
  std::vector<HopModel::Input> inputs;
  for (const core::Update& update : queue_->dequeue()) {
    inputs.push_back({block(update.slot), update.weight});
    if (update.sender != rank_) {
      ++stats_.ages[iteration_ - update.tag];
    }
  }
  ++stats_.group_sizes[static_cast<std::int64_t>(inputs.size())];
  stats_.averages += inputs.size() > 1 ? 1 : 0;
  return inputs;
}

void HopMailbox::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_->release();
  slots_free_.notify_all();
  if (setup_.mode.notify_ack) {
    for (auto& [peer, to] : neighbours_) {
      if (to.sends) {
        post(to, header(HopMessage::kAck, iteration_));
      }
    }
  }
}

int HopMailbox::lag() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int smallest = std::numeric_limits<int>::max();
  for (const auto& [peer, owner] : neighbours_) {
    if (owner.tokens && !owner.tokens->released()) {
      smallest = std::min(smallest, owner.tokens->lag());
    }
  }
  return smallest == std::numeric_limits<int>::max() ? 0 : smallest;
}

void HopMailbox::enter(std::int64_t tag) {
  std::unique_lock<std::mutex> lock(mutex_);
  const int count = static_cast<int>(tag - iteration_);
  if (setup_.mode.notify_ack) {
    const auto holds_back = [this](const Neighbour& to) {
      return to.receives && !to.left && to.acked < iteration_ - 1;
    };
    waitUntil(
        lock, "torchext::hop::wait_acks", stats_.token_wait_ms,
        [&] {
          return std::none_of(neighbours_.begin(), neighbours_.end(),
                              [&](const auto& entry) { return holds_back(entry.second); });
        },
        [&] { return c10::str("the acknowledgement of iteration ", iteration_ - 1, " from ", ranks(holds_back)); });
  }
  if (setup_.mode.hasTokens()) {
    const auto holds_back = [count](const Neighbour& owner) { return owner.tokens && !owner.tokens->canTake(count); };
    waitUntil(
        lock, "torchext::hop::wait_tokens", stats_.token_wait_ms,
        [&] {
          return std::none_of(neighbours_.begin(), neighbours_.end(),
                              [&](const auto& entry) { return holds_back(entry.second); });
        },
        [&] { return c10::str("a token for iteration ", tag, " from ", ranks(holds_back)); });
  }
  for (auto& [peer, owner] : neighbours_) {
    if (owner.tokens) {
      owner.tokens->take(count);
    }
  }
  iteration_ = tag;
  queue_->advance(tag);  // before any token says so: who takes one may send what only now has a slot
  slots_free_.notify_all();
  for (const auto& [peer, from] : neighbours_) {
    if (from.sends && !from.left) {
      const std::int64_t gap = tag - std::max(from.newest, from.tokens ? tag + from.tokens->lag() : 0);
      ++stats_.gaps[gap];
      TORCH_INTERNAL_ASSERT(!debug_ || gap <= from.gap_bound.value_or(gap), "hop: rank ", rank_, " enters iteration ",
                            tag, ", ", gap, " ahead of rank ", peer, "; at most ", *from.gap_bound,
                            " can be with the chosen mode");
    }
  }
  if (setup_.mode.hasTokens()) {
    HopMessage tokens = header(HopMessage::kTokens, tag);
    tokens.count = count;
    for (auto& [peer, consumer] : neighbours_) {
      if (consumer.sends) {
        post(consumer, tokens);
      }
    }
  }
}

}  // namespace torchext
