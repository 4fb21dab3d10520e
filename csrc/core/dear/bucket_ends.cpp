#include "core/dear/bucket_ends.h"

#include <algorithm>

#include "core/base/check.h"

namespace torchext::core {

std::map<int, std::vector<int>> endsByKind(const std::vector<int>& kinds, const std::vector<int>& ends) {
  const auto count = static_cast<int>(kinds.size());
  std::map<int, std::vector<int>> by_kind;
  std::map<int, int> seen;  // kind -> gradients of it so far
  int begin = 0;
  for (const int end : ends) {
    if (end <= begin || end > count) {
      throwInvalid("end of a bucket", end, concat(begin + 1, "..", count));
    }
    for (int place = begin; place < end; ++place) {
      ++seen[kinds[index(place)]];
    }
    const int kind = kinds[index(end - 1)];
    by_kind[kind].push_back(seen[kind]);
    begin = end;
  }
  if (begin != count) {
    throwInvalid("end of the last bucket", begin, concat(count, ", the tensors"));
  }
  for (const auto& [kind, own] : seen) {
    const auto found = by_kind.find(kind);
    const int last = found == by_kind.end() ? 0 : found->second.back();
    if (last != own) {
      throwInvalid("end of the last bucket of an element type", last, concat(own, ", its tensors"));
    }
  }
  return by_kind;
}

bool keepsBuckets(const std::vector<std::int64_t>& planned, const std::vector<int>& ends,
                  const std::vector<std::int64_t>& observed) {
  std::map<std::int64_t, int> stretch_of;  // gradient -> before which end it is
  int begin = 0;
  for (const int end : ends) {
    for (int place = begin; place < end; ++place) {
      stretch_of[planned[index(place)]] = end;
    }
    begin = end;
  }
  std::vector<int> stretches;
  for (const std::int64_t gradient : observed) {
    if (const auto found = stretch_of.find(gradient); found != stretch_of.end()) {
      stretches.push_back(found->second);
    }
  }
  return std::is_sorted(stretches.begin(), stretches.end());
}

}  // namespace torchext::core
