// Tags of K-FAC's messages: each kind has a range of its own, and adds the number of what it sends.
#pragma once

namespace torchext::kfac_tags {

inline constexpr int kStepVote = 0;
inline constexpr int kDirections = 1;      // + owner, or behind them of parts of all ranks
inline constexpr int kInverses = 1 << 20;  // + factor
inline constexpr int kSums = 2 << 20;      // + bucket
inline constexpr int kRows = 3 << 20;      // + message

}  // namespace torchext::kfac_tags
