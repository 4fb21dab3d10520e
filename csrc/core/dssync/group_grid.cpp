#include "core/dssync/group_grid.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/base/check.h"

namespace torchext::core {
namespace {

// Walks all products of numbers from `smallest` on that give `rest`, and keeps the best.
class RadixSearch {
 public:
  RadixSearch(int size, int group_size) : size_(size), group_size_(group_size) {}

  // Empty: no product of allowed radices.
  std::vector<int> best() {
    extend(size_, 2, 0.0);
    std::reverse(best_.begin(), best_.end());
    return best_;
  }

 private:
  void extend(int rest, int smallest, double cost) {
    if (rest == 1) {
      // Costs that differ by rounding only count as equal: the fewer radices, found by either order of additions.
      constexpr double kEqual = 1e-9;
      if (cost < best_cost_ - kEqual || (cost < best_cost_ + kEqual && path_.size() < best_.size())) {
        best_cost_ = cost;
        best_ = path_;
      }
      return;
    }
    // Two factors or more: the smaller one is at most the square root.
    for (int radix = smallest; radix <= rest / radix; ++radix) {
      if (rest % radix == 0) {
        take(radix, rest, cost);
      }
    }
    take(rest, rest, cost);
  }

  void take(int radix, int rest, double cost) {
    const bool everybody = radix == size_ && size_ >= 4;
    if (everybody || radix > kLargestRadix * static_cast<std::int64_t>(group_size_)) {
      return;
    }
    const double distance = std::log(static_cast<double>(radix) / group_size_);
    path_.push_back(radix);
    extend(rest / radix, radix, cost + distance * distance);
    path_.pop_back();
  }

  int size_;
  int group_size_;
  double best_cost_ = std::numeric_limits<double>::infinity();
  std::vector<int> best_;
  std::vector<int> path_;
};

std::vector<int> deal(const std::vector<int>& list, int piles) {
  std::vector<int> dealt;
  dealt.reserve(list.size());
  for (std::size_t pile = 0; pile < index(piles); ++pile) {
    for (std::size_t card = pile; card < list.size(); card += index(piles)) {
      dealt.push_back(list[card]);
    }
  }
  return dealt;
}

// Least p >= 2 with (size / parts)^p >= size.
int dealtRounds(int size, int parts) {
  int rounds = 1;
  const double side = static_cast<double>(size) / parts;
  for (double reach = side; rounds < 2 || reach < size * (1 - 1e-9); reach *= side) {
    ++rounds;
  }
  return rounds;
}

}  // namespace

int groupCount(int size, int group_size) {
  if (group_size >= size || size < 4) {
    return 1;
  }
  const auto nearest = static_cast<int>((static_cast<std::int64_t>(size) + group_size / 2) / group_size);
  return std::clamp(nearest, 2, size / 2);
}

int partBegin(int size, int parts, int part) {
  return static_cast<int>(static_cast<std::int64_t>(size) * part / parts);
}

int partOf(int size, int parts, int position) {
  // The inverse of the rounded-down bound above: the last part that begins at or before position.
  return static_cast<int>((static_cast<std::int64_t>(position + 1) * parts - 1) / size);
}

GroupGrid::GroupGrid(int size, int group_size) : size_(size) {
  if (size < 1) {
    throwInvalid("size of the grid", size, "1 or more");
  }
  if (group_size < 2) {
    throwInvalid("group_size", group_size, "2 or more: a group of one averages nothing");
  }
  if (size == 1) {
    return;
  }
  // Everybody fits into one group, whatever the factors of size are.
  radices_ = group_size >= size ? std::vector<int>{size} : RadixSearch(size, group_size).best();
  if (!radices_.empty()) {
    return;
  }
  parts_ = groupCount(size, group_size);
  std::vector<int> order(index(size));
  std::iota(order.begin(), order.end(), 0);
  for (int round = dealtRounds(size, parts_); round > 0; --round) {
    auto& places = places_.emplace_back(order.size());
    for (std::size_t place = 0; place < order.size(); ++place) {
      places[index(order[place])] = static_cast<int>(place);
    }
    orders_.push_back(order);
    order = deal(order, group_size);
  }
}

int GroupGrid::rounds() const { return std::max(1, static_cast<int>(exact() ? radices_.size() : orders_.size())); }

std::vector<int> GroupGrid::groupOf(int position, std::int64_t round) const {
  checkIndex("position", position, size_);
  if (round < 0) {
    throwInvalid("round", round, "0 or more");
  }
  const auto turn = static_cast<std::size_t>(round % rounds());
  if (size_ == 1) {
    return {0};
  }
  if (exact()) {
    int stride = 1;
    for (std::size_t digit = 0; digit < turn; ++digit) {
      stride *= radices_[digit];
    }
    const int radix = radices_[turn];
    std::vector<int> members(index(radix));
    const int first = position - position / stride % radix * stride;
    for (int i = 0; i < radix; ++i) {
      members[index(i)] = first + i * stride;
    }
    return members;
  }
  const auto& order = orders_[turn];
  const int part = partOf(size_, parts_, places_[turn][index(position)]);
  std::vector<int> members(order.begin() + partBegin(size_, parts_, part),
                           order.begin() + partBegin(size_, parts_, part + 1));
  std::sort(members.begin(), members.end());
  return members;
}

}  // namespace torchext::core
