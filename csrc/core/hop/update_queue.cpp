#include "core/hop/update_queue.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "core/base/check.h"

namespace torchext::core {
namespace {

constexpr std::int64_t kEmpty = -1;

UpdateQueueOptions checked(UpdateQueueOptions options) {
  const auto& senders = options.senders;
  if (senders.empty() || std::adjacent_find(senders.begin(), senders.end(), std::greater_equal<>()) != senders.end() ||
      senders.front() < 0) {
    throwInvalid("senders", senders.empty() ? -1 : senders.front(), "in-neighbours in ascending order, 1 or more");
  }
  const int count = static_cast<int>(senders.size());
  if (options.weights.size() != senders.size()) {
    throwInvalid("size of weights", options.weights.size(), concat(count, ", one an in-neighbour"));
  }
  for (std::size_t i = 0; i < senders.size(); ++i) {
    if (!std::isfinite(options.weights[i]) || options.weights[i] <= 0) {
      throwInvalid("weight", options.weights[i], concat("more than 0, finite; it is that of rank ", senders[i]));
    }
  }
  if (options.max_ahead < 0 || options.max_ahead >= std::numeric_limits<int>::max() / count) {
    throwInvalid("max_ahead", options.max_ahead,
                 concat("0..", std::numeric_limits<int>::max() / count - 1, " with ", count, " in-neighbours"));
  }
  if (options.backup_workers < 0 || options.backup_workers >= count) {
    throwInvalid("backup_workers", options.backup_workers, concat("0..", count - 1, " with ", count, " in-neighbours"));
  }
  if (options.staleness < 0 || (options.staleness > 0 && options.backup_workers > 0)) {
    throwInvalid("staleness", options.staleness, "0 or more, and 0 with backup_workers");
  }
  if (options.first_iteration < 0) {
    throwInvalid("first_iteration", options.first_iteration, "0 or more");
  }
  return options;
}

}  // namespace

UpdateQueue::UpdateQueue(UpdateQueueOptions options)
    : options_(checked(std::move(options))),
      slots_(options_.max_ahead + 1),
      iteration_(options_.first_iteration),
      senders_(options_.senders.size()) {
  for (Sender& sender : senders_) {
    sender.tags.assign(index(slots_), kEmpty);
  }
}

std::size_t UpdateQueue::find(int sender) const {
  const auto& all = options_.senders;
  const auto found = std::lower_bound(all.begin(), all.end(), sender);
  if (found == all.end() || *found != sender) {
    throw std::out_of_range(concat("sender = ", sender, ": allowed are the ", all.size(), " in-neighbours ",
                                   all.front(), " .. ", all.back()));
  }
  return static_cast<std::size_t>(found - all.begin());
}

int UpdateQueue::slotOf(int sender, std::int64_t tag) const {
  const std::size_t position = find(sender);
  if (tag < 0) {
    throw std::out_of_range(concat("tag = ", tag, ": allowed 0 or more"));
  }
  return static_cast<int>(position) * slots_ + static_cast<int>(turn(tag));
}

Admission UpdateQueue::admit(int sender, std::int64_t tag) {
  Sender& from = senders_[find(sender)];
  if (from.arriving || tag <= from.last) {
    throw std::logic_error(concat("update queue: tag ", tag, " of rank ", sender, " after its tag ", from.last,
                                  from.arriving ? ", which is still arriving: one at a time" : ": tags must ascend"));
  }
  if (tag > iteration_ + options_.max_ahead) {
    throw std::logic_error(concat("update queue: tag ", tag, " of rank ", sender, " at iteration ", iteration_,
                                  ": allowed up to ", iteration_ + options_.max_ahead,
                                  "; all ranks need the same graph, mode and max_iteration_gap"));
  }
  if (tag < oldest()) {
    from.last = tag;
    return Admission::kDrop;
  }
  if (from.reading == static_cast<int>(turn(tag))) {
    return Admission::kWait;
  }
  from.last = tag;
  from.arriving = true;
  from.tags[turn(tag)] = kEmpty;
  return Admission::kStore;
}

void UpdateQueue::enqueue(int sender, std::int64_t tag) {
  Sender& from = senders_[find(sender)];
  if (!from.arriving || tag != from.last) {
    throw std::logic_error(concat("update queue: tag ", tag, " of rank ", sender, " enqueued without admit"));
  }
  from.arriving = false;
  // It may have become stale on the way.
  from.tags[turn(tag)] = tag < oldest() ? kEmpty : tag;
}

void UpdateQueue::leave(int sender) {
  Sender& from = senders_[find(sender)];
  if (from.arriving) {
    throw std::logic_error(concat("update queue: rank ", sender, " left while its tag ", from.last, " is arriving"));
  }
  from.left = true;
}

void UpdateQueue::advance(std::int64_t iteration) {
  if (iteration < iteration_) {
    throw std::logic_error(concat("update queue: iteration ", iteration, " after ", iteration_));
  }
  if (held_) {
    throw std::logic_error(concat("update queue: iteration ", iteration, " while slots are read: release them first"));
  }
  iteration_ = iteration;
  for (Sender& sender : senders_) {
    std::replace_if(
        sender.tags.begin(), sender.tags.end(), [this](auto tag) { return tag < oldest(); }, kEmpty);
  }
}

std::int64_t UpdateQueue::candidate(const Sender& sender) const {
  if (options_.staleness == 0) {
    return sender.tags[turn(iteration_)] == iteration_ ? iteration_ : kEmpty;
  }
  return *std::max_element(sender.tags.begin(), sender.tags.end());
}

int UpdateQueue::available() const {
  return static_cast<int>(std::count_if(senders_.begin(), senders_.end(),
                                        [this](const Sender& sender) { return candidate(sender) != kEmpty; }));
}

int UpdateQueue::required() const {
  const auto absent = std::count_if(senders_.begin(), senders_.end(), [this](const Sender& sender) {
    return sender.left && candidate(sender) == kEmpty;
  });
  return std::max(1, static_cast<int>(senders_.size()) - static_cast<int>(absent) - options_.backup_workers);
}

std::vector<Update> UpdateQueue::dequeue() {
  if (held_ || !ready()) {
    throw std::logic_error(held_ ? concat("update queue: dequeue before release at iteration ", iteration_)
                                 : concat("update queue: ", available(), " of ", required(), " models at iteration ",
                                          iteration_, ": ask ready first, and wait"));
  }
  std::vector<Update> taken;
  double sum = 0.0;
  for (std::size_t i = 0; i < senders_.size(); ++i) {
    Sender& sender = senders_[i];
    const std::int64_t tag = candidate(sender);
    if (tag == kEmpty) {
      continue;
    }
    // Newer models count more.
    const double recency = options_.staleness > 0 ? static_cast<double>(tag - oldest() + 1) : 1.0;
    const double weight = options_.weights[i] * recency;
    taken.push_back(Update{options_.senders[i], tag, slotOf(options_.senders[i], tag), weight});
    sum += weight;
    sender.reading = static_cast<int>(turn(tag));
    if (options_.staleness == 0) {
      sender.tags[turn(tag)] = kEmpty;
    }
  }
  for (Update& update : taken) {
    update.weight /= sum;
  }
  held_ = true;
  return taken;
}

void UpdateQueue::release() {
  held_ = false;
  for (Sender& sender : senders_) {
    sender.reading = -1;
  }
}

}  // namespace torchext::core
