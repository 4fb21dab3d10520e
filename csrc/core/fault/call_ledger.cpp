#include "core/fault/call_ledger.h"

#include <algorithm>

namespace torchext::core {

bool CallLedger::record(const CallHeader& header) {
  const Entry entry{header.digest(), header};
  const bool predicted = remembers(next_) && at(next_).digest == entry.digest && at(next_).header == header;
  ++count_;
  const auto position = static_cast<std::size_t>(count_ % kPast);
  if (entries_.size() <= position) {
    entries_.resize(std::min<std::size_t>(kPast, std::max<std::size_t>(2 * position, 64)));
  }
  entries_[position] = entry;
  next_ = predicted ? next_ + 1 : follow();
  return predicted;
}

std::optional<CallHeader> CallLedger::find(std::uint64_t number) const {
  return remembers(number) ? std::optional<CallHeader>(at(number).header) : std::nullopt;
}

std::uint64_t CallLedger::follow() const {
  std::uint64_t best = 0;
  std::uint64_t longest = 0;
  for (std::uint64_t end = count_ - 1; remembers(end) && longest < kContext; --end) {
    std::uint64_t length = 0;
    while (length < kContext && remembers(end - length) && at(end - length).digest == at(count_ - length).digest) {
      ++length;
    }
    if (length > longest) {
      longest = length;
      best = end + 1;
    }
  }
  return best;
}

}  // namespace torchext::core
