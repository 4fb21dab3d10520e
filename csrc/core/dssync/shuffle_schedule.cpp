#include "core/dssync/shuffle_schedule.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/base/check.h"
#include "core/base/enum_names.h"
#include "core/base/random.h"

namespace torchext::core {
namespace {

constexpr EnumNames<ShuffleKind, 3> kShuffleNames{{
    {ShuffleKind::kGrid, "grid"},
    {ShuffleKind::kRandom, "random"},
    {ShuffleKind::kTopology, "topology"},
}};

void checkBandwidth(const std::string& name, double value) {
  if (!std::isfinite(value) || value <= 0) {
    throwInvalid(name.c_str(), value, "more than 0, finite");
  }
}

void checkStep(std::int64_t step) {
  if (step < 0) {
    throwInvalid("step", step, "0 or more");
  }
}

ShuffleOptions checked(ShuffleOptions options) {
  if (options.world_size < 1) {
    throwInvalid("world_size", options.world_size, "1 or more");
  }
  const int largest = std::max(2, options.world_size);
  if (options.group_size < 2 || options.group_size > largest) {
    throwInvalid("group_size", options.group_size, concat("2..max(2, world_size) = 2..", largest));
  }
  if (options.kind == ShuffleKind::kTopology && options.host_of.empty()) {
    throwInvalid("size of host_of", 0, concat("world_size = ", options.world_size, " for schedule topology"));
  }
  checkBandwidth("host_bandwidth", options.host_bandwidth);
  for (std::size_t rack = 0; rack < options.uplink_bandwidth.size(); ++rack) {
    checkBandwidth(concat("uplink_bandwidth[", rack, "]"), options.uplink_bandwidth[rack]);
  }
  return options;
}

HostMap racksOf(const ShuffleOptions& options, int hosts) {
  std::vector<int> rack_of = options.rack_of;
  if (rack_of.empty()) {
    rack_of.resize(index(hosts));
    std::iota(rack_of.begin(), rack_of.end(), 0);
  } else if (rack_of.size() != index(hosts)) {
    throwInvalid("size of rack_of", rack_of.size(), concat("0 or the number of hosts in host_of = ", hosts));
  }
  const auto [low, high] = std::minmax_element(rack_of.begin(), rack_of.end());
  if (*low < 0 || *high >= hosts) {
    throwInvalid("rack_of", *low < 0 ? *low : *high, concat("rack indices 0..", hosts - 1));
  }
  for (int rack = 0; rack <= *high; ++rack) {
    if (std::find(rack_of.begin(), rack_of.end(), rack) == rack_of.end()) {
      throwInvalid("rack_of", concat("indices up to ", *high), concat("dense indices: no host is in rack ", rack));
    }
  }
  return HostMap::fromHostOf(rack_of, hosts);
}

int inRackRounds(const ShuffleOptions& options, int racks) {
  if (!options.uplink_bandwidth.empty() && options.uplink_bandwidth.size() != index(racks)) {
    throwInvalid("size of uplink_bandwidth", options.uplink_bandwidth.size(),
                 concat("0 or the number of racks = ", racks));
  }
  if (options.kind != ShuffleKind::kTopology || racks == 1) {
    return 0;
  }
  double slowest = options.host_bandwidth;
  for (const double bandwidth : options.uplink_bandwidth) {
    slowest = std::min(slowest, bandwidth);
  }
  const double ratio = std::min<double>(kMostInRackRounds, std::ceil(options.host_bandwidth / slowest - 1e-9));
  return std::max(2, static_cast<int>(ratio));
}

}  // namespace

ShuffleKind parseShuffleKind(const std::string& name) { return parseEnum(kShuffleNames, "schedule", name); }

const char* toString(ShuffleKind kind) { return enumName(kShuffleNames, "ShuffleKind", kind); }

ShuffleSchedule::ShuffleSchedule(ShuffleOptions options)
    : options_(checked(std::move(options))),
      hosts_(HostMap::fromHostOf(options_.host_of, options_.world_size)),
      racks_(racksOf(options_, hosts_.hostCount())),
      grid_(options_.kind == ShuffleKind::kTopology ? racks_.hostCount() : options_.world_size, options_.group_size),
      position_(index(options_.world_size)),
      in_rack_rounds_(core::inRackRounds(options_, racks_.hostCount())),
      random_key_(Random(options_.seed).next()) {
  for (int rack = 0; rack < racks_.hostCount(); ++rack) {
    std::vector<int> ranks;
    for (const int host : racks_.ranksOf(rack)) {
      ranks.insert(ranks.end(), hosts_.ranksOf(host).begin(), hosts_.ranksOf(host).end());
    }
    for (std::size_t position = 0; position < ranks.size(); ++position) {
      position_[index(ranks[position])] = static_cast<int>(position);
    }
    const int size = static_cast<int>(ranks.size());
    members_.push_back(Rack{GroupGrid(size, options_.group_size), std::move(ranks)});
  }
}

std::vector<int> ShuffleSchedule::groupOf(int rank, std::int64_t step) const {
  checkIndex("rank", rank, options_.world_size);
  checkStep(step);
  switch (options_.kind) {
    case ShuffleKind::kGrid:
      return grid_.groupOf(rank, step);
    case ShuffleKind::kRandom:
      return randomGroup(rank, step);
    case ShuffleKind::kTopology:
      break;
  }
  if (in_rack_rounds_ == 0) {
    return inRackGroup(rank, step);
  }
  // Rounds inside racks are counted on their own, so that every coordinate of a rack's grid gets its turn.
  const std::int64_t cycle = step / (in_rack_rounds_ + 1);
  return crosses(step) ? crossGroup(rank, cycle) : inRackGroup(rank, step - cycle);
}

std::vector<int> ShuffleSchedule::randomGroup(int rank, std::int64_t step) const {
  std::vector<int> order(index(options_.world_size));
  std::iota(order.begin(), order.end(), 0);
  // An odd multiplier keeps the keys of all steps distinct; Random scrambles them.
  Random random(random_key_ ^ (static_cast<std::uint64_t>(step) * 0xD1342543DE82EF95ULL));
  random.shuffle(order);
  const int place = static_cast<int>(std::find(order.begin(), order.end(), rank) - order.begin());
  const int parts = groupCount(options_.world_size, options_.group_size);
  const int part = partOf(options_.world_size, parts, place);
  std::vector<int> members(order.begin() + partBegin(options_.world_size, parts, part),
                           order.begin() + partBegin(options_.world_size, parts, part + 1));
  std::sort(members.begin(), members.end());
  return members;
}

std::vector<int> ShuffleSchedule::inRackGroup(int rank, std::int64_t round) const {
  const Rack& rack = members_[index(racks_.hostOf(hosts_.hostOf(rank)))];
  std::vector<int> members = rack.grid.groupOf(position_[index(rank)], round);
  for (int& member : members) {
    member = rack.ranks[index(member)];
  }
  std::sort(members.begin(), members.end());
  return members;
}

std::vector<int> ShuffleSchedule::crossGroup(int rank, std::int64_t round) const {
  std::vector<int> members;
  for (const int rack : grid_.groupOf(racks_.hostOf(hosts_.hostOf(rank)), round)) {
    const auto& ranks = members_[index(rack)].ranks;
    members.insert(members.end(), ranks.begin(), ranks.end());
  }
  std::sort(members.begin(), members.end());
  return members;
}

std::vector<std::vector<int>> ShuffleSchedule::groupsAt(std::int64_t step) const {
  std::vector<std::vector<int>> groups;
  std::vector<bool> seen(index(options_.world_size), false);
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if (!seen[index(rank)]) {
      groups.push_back(groupOf(rank, step));
      for (const int member : groups.back()) {
        seen[index(member)] = true;
      }
    }
  }
  return groups;
}

std::int64_t ShuffleSchedule::period() const {
  switch (options_.kind) {
    case ShuffleKind::kGrid:
      return grid_.rounds();
    case ShuffleKind::kRandom:
      return 0;
    case ShuffleKind::kTopology:
      break;
  }
  std::int64_t in_rack = 1;
  for (const Rack& rack : members_) {
    in_rack = std::lcm(in_rack, static_cast<std::int64_t>(rack.grid.rounds()));
  }
  if (in_rack_rounds_ == 0) {
    return in_rack;
  }
  const std::int64_t cycles = in_rack / std::gcd(in_rack, static_cast<std::int64_t>(in_rack_rounds_));
  return std::lcm(cycles, static_cast<std::int64_t>(grid_.rounds())) * (in_rack_rounds_ + 1);
}

bool ShuffleSchedule::crosses(std::int64_t step) const {
  checkStep(step);
  return in_rack_rounds_ > 0 && step % (in_rack_rounds_ + 1) == in_rack_rounds_;
}

RoundTraffic ShuffleSchedule::traffic(std::int64_t step, double payload) const {
  if (!std::isfinite(payload) || payload < 0) {
    throwInvalid("payload", payload, "0 or more bytes, finite");
  }
  RoundTraffic result{std::vector<double>(index(options_.world_size), 0.0),
                      std::vector<double>(index(hosts_.hostCount()), 0.0),
                      std::vector<double>(index(racks_.hostCount()), 0.0)};
  for (const auto& group : groupsAt(step)) {
    const auto size = static_cast<double>(group.size());
    const double bytes = 2.0 * (size - 1.0) / size * payload;
    for (std::size_t i = 0; i < group.size(); ++i) {
      const int host = hosts_.hostOf(group[i]);
      const int next = hosts_.hostOf(group[(i + 1) % group.size()]);
      const int rack = racks_.hostOf(host);
      result.rank[index(group[i])] = bytes;
      result.host[index(host)] += host != next ? bytes : 0.0;
      result.uplink[index(rack)] += rack != racks_.hostOf(next) ? bytes : 0.0;
    }
  }
  return result;
}

}  // namespace torchext::core
