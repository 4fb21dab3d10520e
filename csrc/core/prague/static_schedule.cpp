#include "core/prague/static_schedule.h"

#include <algorithm>

#include "core/base/check.h"
#include "core/base/host_map.h"

namespace torchext::core {
namespace {

// One host: neighbours pair up, from rank `shift` on; the last three stay together when the number is odd.
std::vector<int> neighbours(int rank, int shift, int world_size) {
  const int position = (rank - shift + world_size) % world_size;
  const int pairs = std::max(1, world_size / 2);
  const int pair = std::min(position / 2, pairs - 1);
  const int begin = 2 * pair;
  const int end = pair == pairs - 1 ? world_size : begin + 2;
  std::vector<int> members;
  for (int i = begin; i < end; ++i) {
    members.push_back((i + shift) % world_size);
  }
  return members;
}

// A host while its head is away: the others in cyclic order after the head, in pairs, the first alone if they are odd.
std::vector<int> insideHost(int local, int head, const std::vector<int>& ranks) {
  const int size = static_cast<int>(ranks.size());
  const int position = (local - head - 1 + size) % size;
  const int odd = (size - 1) % 2;
  if (position < odd) {
    return {ranks[index(local)]};
  }
  const int first = position - (position - odd) % 2;
  return {ranks[index((head + 1 + first) % size)], ranks[index((head + 2 + first) % size)]};
}

}  // namespace

std::vector<int> staticGroup(int rank, std::int64_t step, int world_size, const std::vector<int>& host_of) {
  const HostMap hosts = HostMap::fromHostOf(host_of, world_size);
  checkIndex("rank", rank, world_size);
  if (step < 0) {
    throwInvalid("step", step, "0 or more");
  }
  const auto& ranks = hosts.ranksOf(hosts.hostOf(rank));
  if (step % 2 == 1) {
    return ranks;
  }
  const int turn = static_cast<int>(step % kStaticPeriod) / 2;
  std::vector<int> members;
  if (hosts.hostCount() == 1) {
    members = neighbours(rank, turn, world_size);
  } else {
    // A host of one worker has only that one to send.
    const auto head_of = [turn](const std::vector<int>& host) { return turn % static_cast<int>(host.size()); };
    const int local = hosts.localRank(rank);
    if (local != head_of(ranks)) {
      members = insideHost(local, head_of(ranks), ranks);
    } else {
      for (int host = 0; host < hosts.hostCount(); ++host) {
        const auto& others = hosts.ranksOf(host);
        members.push_back(others[index(head_of(others))]);
      }
    }
  }
  std::sort(members.begin(), members.end());
  return members;
}

}  // namespace torchext::core
