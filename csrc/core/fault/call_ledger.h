// CallLedger: the collectives that a rank has called, and which of them the ranks need not agree on first.
//
// The problem
//   Ranks must call the same collectives in the same order. To compare headers before each call costs a round of
//   messages, a good part of a small collective.
//
// The idea
//   Programs repeat themselves. From the calls so far each rank predicts the next one, and calls that were predicted
//   start at once, without a message. A call that was not predicted starts after all ranks have agreed on it.
//
// Why that finds every difference
//   The prediction is a function of the calls so far and of nothing else. As long as all ranks have made the same calls
//   they predict the same. When rank a makes another call than rank b, at most one of the two calls is the predicted
//   one. So the other rank asks before it starts, and learns of the difference. All ranks that did start made the
//   predicted call: never do two ranks exchange data of different calls.
//
// How it predicts
//   It follows the calls as they went the last time: a position in the past which moves on with every call that was
//   right. After a wrong one it looks for the longest stretch of the past, up to kContext calls, that ends like the
//   present; of equally long ones the last. A loop is predicted from its third round on, mostly from the second.
//
// Memory: 64 bytes for each of the last kPast calls. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/fault/call_header.h"

namespace torchext::core {

class CallLedger {
 public:
  static constexpr std::uint64_t kPast = 2048;   // calls that are remembered, a power of two
  static constexpr std::uint64_t kContext = 16;  // calls that are compared after a wrong prediction

  // The next call. True if it was predicted.
  bool record(const CallHeader& header);
  // Calls so far; the number of the last one, as numbers start from 1.
  std::uint64_t count() const { return count_; }
  // Call number `number`, or nothing when it was not made yet or is forgotten.
  std::optional<CallHeader> find(std::uint64_t number) const;

 private:
  struct Entry {
    std::uint64_t digest = 0;
    CallHeader header;
  };
  const Entry& at(std::uint64_t number) const { return entries_[number % kPast]; }
  bool remembers(std::uint64_t number) const { return number > 0 && number <= count_ && count_ - number < kPast; }
  std::uint64_t follow() const;

  std::vector<Entry> entries_;
  std::uint64_t count_ = 0;
  std::uint64_t next_ = 0;  // the call of the past that is predicted to come again; 0: none
};

}  // namespace torchext::core
