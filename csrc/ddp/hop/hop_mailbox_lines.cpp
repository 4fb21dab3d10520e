// What the lines of a mailbox ask for, bring and take away. Each function is called on a line's own thread.
#include <utility>

#include <c10/util/Exception.h>

#include "ddp/hop/hop_mailbox.h"

namespace torchext {

using core::HopMessage;

void HopMailbox::post(Neighbour& to, const HopMessage& message) {
  if (to.left) {
    return;
  }
  if (message.kind == HopMessage::kTokens && !to.urgent.empty() && to.urgent.back().kind == HopMessage::kTokens) {
    to.urgent.back().count += message.count;
    to.urgent.back().tag = message.tag;
  } else {
    to.urgent.push_back(message);
  }
  to.to_send.notify_one();
}

// A model that its receiver could only throw away. What the receiver's tokens tell is where it stood when it gave them.
void HopMailbox::dropPassed(Neighbour& to) {
  if (!to.tokens || to.tokens->released()) {
    return;
  }
  const std::int64_t reached = iteration_ + to.tokens->lag();
  while (!to.models.empty() && to.models.front() < reached - setup_.mode.staleness) {
    --sending(to.models.front());
    to.models.pop_front();
    ++stats_.not_sent;
    changed_.notify_all();
  }
}

std::optional<HopLineOwner::Outgoing> HopMailbox::next(int peer) {
  std::unique_lock<std::mutex> lock(mutex_);
  Neighbour& to = neighbours_.at(peer);
  while (!stopping_ && !error_) {
    if (!to.urgent.empty()) {
      const HopMessage message = to.urgent.front();
      to.urgent.pop_front();
      return Outgoing{message, nullptr};
    }
    dropPassed(to);
    // Two that drain take nothing any more, and would wait for each other's acknowledgement.
    const bool acked =
        !setup_.mode.notify_ack || draining_ || (!to.models.empty() && to.acked >= to.models.front() - 1);
    if (!to.models.empty() && acked) {
      const std::int64_t tag = to.models.front();
      to.models.pop_front();
      return Outgoing{header(HopMessage::kModel, tag), block(queue_->slotOf(rank_, tag))};
    }
    if (to.models.empty() && to.farewell) {
      return Outgoing{header(*std::exchange(to.farewell, std::nullopt), iteration_), nullptr};
    }
    to.to_send.wait(lock);
  }
  return std::nullopt;
}

void HopMailbox::sent(int peer, const HopMessage& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.bytes_sent += static_cast<std::int64_t>(sizeof(header) + header.bytes);
  if (header.kind == HopMessage::kModel) {
    --sending(header.tag);
  } else if (header.kind == HopMessage::kPause || header.kind == HopMessage::kLeave) {
    neighbours_.at(peer).farewell_sent = true;
  }
  changed_.notify_all();
}

void HopMailbox::checkSession(int peer, const HopMessage& header) const {
  if (header.session != session_ || neighbours_.at(peer).left) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("hop: a message of session ", header.session, " from rank ", peer, " in session ",
                             session_, neighbours_.at(peer).left ? ", which it has left" : "",
                             ": all ranks must call synchronize, averaged and detach equally often"));
  }
}

std::byte* HopMailbox::destination(int peer, const HopMessage& header) {
  std::unique_lock<std::mutex> lock(mutex_);
  checkSession(peer, header);
  Neighbour& from = neighbours_.at(peer);
  if (!from.sends) {
    C10_THROW_ERROR(DistBackendError, c10::str("hop: a model from rank ", peer, ", which is no in-neighbour"));
  }
  from.newest = std::max(from.newest, header.tag);
  const auto too_late = [&] {
    from.scratch.resize(setup_.model_bytes);
    return from.scratch.data();
  };
  while (!stopping_ && !error_) {
    if (draining_) {
      return too_late();
    }
    if (header.tag <= queue_->iteration() + max_ahead_) {
      switch (queue_->admit(peer, header.tag)) {
        case core::Admission::kStore:
          from.storing = true;
          return block(queue_->slotOf(peer, header.tag));
        case core::Admission::kDrop:
          ++stats_.too_late;
          return too_late();
        case core::Admission::kWait:
          break;
      }
    }
    slots_free_.wait(lock);
  }
  return nullptr;
}

bool HopMailbox::received(int peer, const HopMessage& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  checkSession(peer, header);
  Neighbour& from = neighbours_.at(peer);
  progress_ = std::chrono::steady_clock::now();
  changed_.notify_all();
  switch (header.kind) {
    case HopMessage::kModel:
      if (std::exchange(from.storing, false)) {
        queue_->enqueue(peer, header.tag);
      }
      return true;
    case HopMessage::kTokens:
      tokensFrom(peer, from, header);
      return true;
    case HopMessage::kAck:
      if (!setup_.mode.notify_ack || !from.receives || header.tag <= from.acked) {
        C10_THROW_ERROR(DistBackendError, c10::str("hop: rank ", peer, " acknowledges iteration ", header.tag,
                                                   " after ", from.acked, "; nobody asked for it"));
      }
      from.acked = header.tag;
      from.to_send.notify_one();
      return true;
    default:
      leftBy(peer, from, header.kind == HopMessage::kLeave);
      return !from.gone;
  }
}

void HopMailbox::tokensFrom(int peer, Neighbour& from, const HopMessage& header) {
  if (!from.tokens) {
    C10_THROW_ERROR(DistBackendError, c10::str("hop: tokens from rank ", peer, ", which owns none for this rank"));
  }
  from.tokens->give(header.count);
  const std::int64_t expected = setup_.mode.max_iteration_gap + header.tag - iteration_;
  if (from.tokens->size() != expected) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("hop: ", from.tokens->size(), " tokens of rank ", peer, " at its iteration ", header.tag,
                             " and the own ", iteration_, ", expected ", expected));
  }
}

void HopMailbox::leftBy(int peer, Neighbour& from, bool for_good) {
  from.left = true;
  from.gone = from.gone || for_good;
  if (from.sends) {
    queue_->leave(peer);
  }
  if (from.tokens) {
    from.tokens->release();
  }
  for (const std::int64_t tag : from.models) {
    --sending(tag);
  }
  from.models.clear();
  from.urgent.clear();
  from.to_send.notify_one();
}

void HopMailbox::fail(const std::exception_ptr& error) {
  if (!error_) {
    error_ = error;
  }
  changed_.notify_all();
  slots_free_.notify_all();
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.to_send.notify_all();
  }
}

void HopMailbox::failed(int peer, std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || error_) {
      return;
    }
  }
  // A broken connection becomes the error that names who died, and has poisoned the group.
  error = group_->health()->explain(error, OpInfo{.name = "training", .peer = peer});
  if (!group_->health()->failed()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& what) {
      group_->health()->poison(peer, what.what());
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  fail(error);
}

}  // namespace torchext
