#include "core/prague/group_generator_base.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace torchext::core {

GroupGeneratorBase::GroupGeneratorBase(const GeneratorOptions& options)
    : options_(options),
      random_(options.seed),
      filter_(options.world_size, options.slowdown_threshold),
      rejoin_window_(options.world_size, options.longest_wait),
      workers_(index(options.world_size)),
      active_count_(options.world_size) {}

Deliveries GroupGeneratorBase::request(int worker, double now) {
  if (!std::isfinite(now)) {
    throwInvalid("now", now, "finite seconds");
  }
  Worker& state = checkedWorker("request", worker);
  if (state.waiting) {
    throw std::logic_error(
        concat("request of worker ", worker, ": its request number ", state.requests, " is not answered yet"));
  }
  if (!state.running.empty()) {
    throw std::logic_error(concat("request of worker ", worker, ": group ", state.running.front(), " (",
                                  state.running.size(), " under way) must be completed first"));
  }
  if (!state.active) {
    state.active = true;
    ++active_count_;
    filter_.onReturn(worker);
  }
  ++state.requests;
  now_ = now;
  filter_.onRequest(worker, now);
  rejoin_window_.onRequest(worker, now);
  state.waiting = true;
  Deliveries out;
  if (state.fifo.empty()) {
    onArrival(now);
    queue_.push_back(worker);
  } else {
    deliverHead(worker, out);
  }
  admit(out);
  return out;
}

Deliveries GroupGeneratorBase::complete(int worker, std::uint64_t group_id, double now) {
  Worker& state = checkedWorker("complete", worker);
  const auto found = std::find(state.running.begin(), state.running.end(), group_id);
  if (found == state.running.end()) {
    throw std::logic_error(concat("complete of worker ", worker, ": group ", group_id, " is not under way (",
                                  state.running.size(), " under way, first ",
                                  state.running.empty() ? 0 : state.running.front(), ")"));
  }
  now_ = now;
  state.running.erase(found);
  release(group_id);
  Deliveries out;
  onComplete(worker, out);
  return out;
}

Deliveries GroupGeneratorBase::meet(int worker, double now) {
  Deliveries out = drain("meet", worker, now);
  rejoin_window_.onMeet(worker, now);
  return out;
}

// Everything that still names worker, which is not active afterwards.
Deliveries GroupGeneratorBase::drain(const char* call, int worker, double now) {
  Worker& state = checkedWorker(call, worker);
  if (state.waiting) {
    throw std::logic_error(
        concat(call, " of worker ", worker, ": its request number ", state.requests, " is not answered yet"));
  }
  if (state.active && !state.running.empty()) {
    throw std::logic_error(
        concat(call, " of worker ", worker, ": group ", state.running.front(), " must be completed first"));
  }
  now_ = now;
  Deliveries out;
  while (!state.fifo.empty()) {
    deliverHead(worker, out);
  }
  out.push_back(Delivery{worker, Group{}});
  if (state.active) {
    deactivate(worker);
    onInactive(worker, out);
  }
  return out;
}

Deliveries GroupGeneratorBase::leave(int worker, double now) {
  checkIndex("worker", worker, options_.world_size);
  Worker& state = workers_[index(worker)];
  Deliveries out;
  if (state.gone) {
    return out;
  }
  now_ = now;
  state.gone = true;
  state.waiting = false;
  for (const auto id : state.fifo) {
    Record& record = groups_.at(id);
    if (record.told == 0) {
      auto& members = record.group.members;
      members.erase(std::find(members.begin(), members.end(), worker));
    }
    release(id);
  }
  for (const auto id : state.running) {
    release(id);
  }
  state.fifo.clear();
  state.running.clear();
  rejoin_window_.onLeave(worker);
  if (state.active) {
    deactivate(worker);
    onInactive(worker, out);
  }
  admit(out);
  return out;
}

Deliveries GroupGeneratorBase::tick(double now) {
  now_ = now;
  rejoin_window_.expire(now);
  Deliveries out;
  admit(out);
  onTick(now, out);
  return out;
}

std::int64_t GroupGeneratorBase::requestCount(int worker) const {
  checkIndex("worker", worker, options_.world_size);
  return workers_[index(worker)].requests;
}

void GroupGeneratorBase::formGroup(std::vector<int> members, Deliveries& out) {
  std::sort(members.begin(), members.end());
  const std::uint64_t id = ++last_id_;
  Record& record = groups_[id];
  record.open = static_cast<int>(members.size());
  record.group = Group{id, std::move(members)};
  for (const int member : record.group.members) {
    workers_[index(member)].fifo.push_back(id);
    if (waiting(member)) {
      deliverHead(member, out);
    }
  }
}

bool GroupGeneratorBase::countDivision() {
  ++divisions_;
  return options_.sync_every != 0 && divisions_ % options_.sync_every == 0;
}

std::vector<int> GroupGeneratorBase::withoutFiltered(int initiator, std::vector<int> workers) const {
  const auto limit = filter_.reference(initiator, workers);
  const auto late = [&](int worker) { return worker != initiator && filter_.late(limit, worker); };
  workers.erase(std::remove_if(workers.begin(), workers.end(), late), workers.end());
  return workers;
}

std::vector<int> GroupGeneratorBase::activeWorkers() const {
  std::vector<int> members;
  for (int worker = 0; worker < options_.world_size; ++worker) {
    if (active(worker)) {
      members.push_back(worker);
    }
  }
  return members;
}

bool GroupGeneratorBase::idle(int worker) const {
  const Worker& state = workers_[index(worker)];
  return state.active && state.fifo.empty() && state.running.empty();
}

bool GroupGeneratorBase::idleSoon(int worker) const {
  const Worker& state = workers_[index(worker)];
  const auto complete = [&](std::uint64_t id) {
    const Record& record = groups_.at(id);
    return record.told == record.group.members.size();
  };
  return state.active && state.fifo.empty() && std::all_of(state.running.begin(), state.running.end(), complete);
}

GroupGeneratorBase::Worker& GroupGeneratorBase::checkedWorker(const char* call, int worker) {
  checkIndex("worker", worker, options_.world_size);
  Worker& state = workers_[index(worker)];
  if (state.gone) {
    throw std::logic_error(
        concat(call, " of worker ", worker, ": it left after ", state.requests, " requests and cannot return"));
  }
  return state;
}

void GroupGeneratorBase::deliverHead(int worker, Deliveries& out) {
  Worker& state = workers_[index(worker)];
  const std::uint64_t id = state.fifo.front();
  state.fifo.pop_front();
  state.running.push_back(id);
  state.waiting = false;
  Record& record = groups_.at(id);
  state.told_at = now_;
  out.push_back(Delivery{worker, record.group});
  if (++record.told == record.group.members.size()) {
    for (const int member : record.group.members) {
      const Worker& arrived = workers_[index(member)];
      if (arrived.active) {
        filter_.onWaited(member, now_ - arrived.told_at);
      }
    }
  }
}

// Gives those that have asked their turns, unless they wait for others that have met.
void GroupGeneratorBase::admit(Deliveries& out) {
  while (!rejoin_window_.open() && !queue_.empty()) {
    const int worker = queue_.front();
    queue_.pop_front();
    if (waiting(worker)) {  // not in the group of one that had its turn before, and alive
      onRequest(worker, now_, out);
    }
  }
}

void GroupGeneratorBase::deactivate(int worker) {
  workers_[index(worker)].active = false;
  filter_.onPause(worker);
  --active_count_;
}

void GroupGeneratorBase::release(std::uint64_t group_id) {
  const auto found = groups_.find(group_id);
  if (--found->second.open == 0) {
    groups_.erase(found);
  }
}

}  // namespace torchext::core
