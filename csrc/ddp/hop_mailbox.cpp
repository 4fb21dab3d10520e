// What the training thread does with its mailbox. The lines' side: hop_mailbox_lines.cpp.
#include "ddp/hop_mailbox.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

namespace torchext {
namespace {

using Clock = std::chrono::steady_clock;
using core::HopMessage;

at::Tensor memoryFor(int models, std::size_t bytes) {
  return at::empty({static_cast<std::int64_t>(models) * static_cast<std::int64_t>(bytes)}, at::kByte);
}

}  // namespace

HopMailbox::HopMailbox(c10::intrusive_ptr<AttachableBackend> group, HopSetup setup)
    : group_(std::move(group)),
      setup_(std::move(setup)),
      rank_(group_->getRank()),
      max_ahead_(core::largestLead(setup_.mode, setup_.graph)),
      memory_(
          memoryFor((max_ahead_ + 1) * static_cast<int>(setup_.graph.inNeighbours(rank_).size()), setup_.model_bytes)),
      sending_(static_cast<std::size_t>(max_ahead_) + 1, 0) {
  for (const int peer : setup_.graph.inNeighbours(rank_)) {
    if (peer != rank_) {
      neighbours_[peer].sends = true;
    }
  }
  for (const int peer : setup_.graph.outNeighbours(rank_)) {
    if (peer != rank_) {
      neighbours_[peer].receives = true;
    }
  }
  stats_.slot_bytes = static_cast<std::int64_t>(memory_.nbytes());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    beginSession();
  }
  abort_callback_ = group_->addAbortCallback([this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail(group_->health()->failureOf({.name = "training"}));
  });
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.line = std::make_unique<HopLine>(*group_, static_cast<HopLineOwner&>(*this), peer, setup_.channel);
  }
}

HopMailbox::~HopMailbox() { HopMailbox::stop(); }

void HopMailbox::beginSession() {
  queue_ = std::make_unique<core::UpdateQueue>(core::UpdateQueueOptions{.senders = setup_.graph.inNeighbours(rank_),
                                                                        .weights = setup_.graph.inWeights(rank_),
                                                                        .max_ahead = max_ahead_,
                                                                        .backup_workers = setup_.mode.backup_workers,
                                                                        .staleness = setup_.mode.staleness});
  iteration_ = 0;
  draining_ = false;
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.acked = neighbour.newest = -1;
    neighbour.left = neighbour.farewell_sent = false;
    if (setup_.mode.hasTokens() && neighbour.receives) {
      // The capacity of the paper is that along a path on which nobody has left. It bounds no memory: as large as can
      // be, and the identity is checked instead.
      neighbour.tokens.emplace(setup_.mode.max_iteration_gap,
                               std::numeric_limits<int>::max() / setup_.mode.max_iteration_gap - 1);
    }
    if (neighbour.gone) {
      leftBy(peer, neighbour, true);
    }
  }
}

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

template <class Which>
std::string HopMailbox::ranks(Which which) const {
  std::vector<int> found;
  for (const auto& [peer, neighbour] : neighbours_) {
    if (which(neighbour)) {
      found.push_back(peer);
    }
  }
  return c10::str(found.size() == 1 ? "rank " : "ranks ", c10::Join(", ", found));
}

template <class Ready, class Missing>
void HopMailbox::waitUntil(std::unique_lock<std::mutex>& lock, const char* range, double& spent_ms, Ready ready,
                           Missing missing) {
  if (!error_ && !ready()) {
    RECORD_FUNCTION(range, std::vector<c10::IValue>{});
    const auto start = Clock::now();
    const auto timeout = group_->timeout();
    const bool in_time = changed_.wait_for(lock, timeout, [&] { return error_ || ready(); });
    ++stats_.waits;
    spent_ms += std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    if (!in_time) {
      const std::string text = c10::str("rank ", rank_, " waited ", timeout.count(), " ms for ", missing());
      lock.unlock();
      group_->poison(rank_, text);  // its callback sets error_
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
      ++stats_.gaps[tag - std::max(from.newest, from.tokens ? tag + from.tokens->lag() : 0)];
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

bool HopMailbox::drain(bool finally, std::optional<std::chrono::milliseconds> limit) {
  RECORD_FUNCTION("torchext::hop::drain", std::vector<c10::IValue>{});
  std::unique_lock<std::mutex> lock(mutex_);
  draining_ = true;
  for (auto& [peer, neighbour] : neighbours_) {
    neighbour.farewell = finally ? HopMessage::kLeave : HopMessage::kPause;
    neighbour.to_send.notify_one();
  }
  slots_free_.notify_all();
  const auto here = [](const auto& entry) { return entry.second.left && entry.second.farewell_sent; };
  const auto all_here = [&] { return std::all_of(neighbours_.begin(), neighbours_.end(), here); };
  const auto deadline = Clock::now() + limit.value_or(std::chrono::milliseconds(0));
  while (!error_ && !all_here()) {
    const std::uint64_t before = progress_;
    const auto timeout = group_->timeout();
    if (limit) {
      if (!changed_.wait_until(lock, deadline, [&] { return error_ || all_here(); })) {
        return false;
      }
    } else if (!changed_.wait_for(lock, timeout, [&] { return error_ || all_here() || progress_ != before; })) {
      const auto text =
          c10::str("rank ", rank_, " waited ", timeout.count(), " ms in synchronize, averaged or detach for ",
                   ranks([](const Neighbour& peer) { return !peer.left; }), ", which trained no further");
      lock.unlock();
      group_->poison(rank_, text);
      lock.lock();
      fail(group_->health()->failureOf({.name = "training"}));
    }
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  if (!finally) {
    ++session_;
    beginSession();
  }
  return true;
}

void HopMailbox::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    slots_free_.notify_all();
    for (auto& [peer, neighbour] : neighbours_) {
      neighbour.to_send.notify_all();
    }
  }
  group_->removeAbortCallback(abort_callback_);
  for (auto& [peer, neighbour] : neighbours_) {
    if (neighbour.line) {
      neighbour.line->stop();
    }
  }
}

void HopMailbox::checkUsable() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_) {
    std::rethrow_exception(error_);
  }
}

HopStats HopMailbox::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  HopStats result = stats_;
  for (const auto& [peer, owner] : neighbours_) {
    if (owner.tokens && !owner.tokens->released()) {
      result.tokens[peer] = owner.tokens->size();
    }
  }
  return result;
}

}  // namespace torchext
