#include "tests/cpp/core/pipeline/all_schedules.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

namespace torchext::core::testing {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();
constexpr std::size_t kMost = 8;  // stages, micro-batches

void extend(std::vector<Sequence>& all, Sequence& now, int microbatches, int limit, bool split) {
  const auto forwards = std::count(now.begin(), now.end(), 'F');
  const auto backwards = std::count(now.begin(), now.end(), split ? 'I' : 'B');
  const auto ends = std::count(now.begin(), now.end(), split ? 'W' : 'B');
  const auto go = [&](bool allowed, char action) {
    if (allowed) {
      now.push_back(action);
      extend(all, now, microbatches, limit, split);
      now.pop_back();
    }
  };
  if (ends == microbatches) {
    all.push_back(now);
    return;
  }
  go(forwards < microbatches && forwards - ends < limit, 'F');
  go(backwards < forwards, split ? 'I' : 'B');
  go(split && ends < backwards, 'W');
}

// What one stage has done.
struct Place {
  std::size_t next = 0;
  std::size_t forwards = 0;
  std::size_t backwards = 0;
  double now = 0;
  double forward_link = 0;
  double backward_link = 0;
};

}  // namespace

std::vector<Sequence> allSequences(int microbatches, int limit, bool split) {
  std::vector<Sequence> all;
  Sequence now;
  extend(all, now, microbatches, limit, split);
  return all;
}

double playedSeconds(const std::vector<StageTimes>& stages, const std::vector<const Sequence*>& sequences) {
  const std::size_t count = stages.size();
  std::array<Place, kMost> places{};
  std::array<std::array<double, kMost>, kMost> outputs{};    // [stage][m] when its input has arrived
  std::array<std::array<double, kMost>, kMost> gradients{};  // the same of its output's gradient
  std::array<std::size_t, kMost> sent_forward{};
  std::array<std::size_t, kMost> sent_backward{};
  bool moved = true;
  while (moved) {
    moved = false;
    for (std::size_t j = 0; j < count; ++j) {
      Place& place = places[j];
      const Sequence& sequence = *sequences[j];
      while (place.next < sequence.size()) {
        const char action = sequence[place.next];
        if (action == 'F') {
          if (j > 0 && sent_forward[j - 1] <= place.forwards) {
            break;
          }
          place.now = std::max(place.now, j > 0 ? outputs[j][place.forwards] : 0) + stages[j].forward_seconds;
          if (j + 1 < count) {
            place.forward_link = std::max(place.forward_link, place.now) + stages[j].transfer_seconds;
            outputs[j + 1][place.forwards] = place.forward_link;
            ++sent_forward[j];
          }
          ++place.forwards;
        } else if (action == 'W') {
          place.now += stages[j].backward_weight_seconds;
        } else {
          if (j + 1 < count && sent_backward[j + 1] <= place.backwards) {
            break;
          }
          place.now = std::max(place.now, j + 1 < count ? gradients[j][place.backwards] : 0) +
                      (action == 'B' ? stages[j].backward_seconds : stages[j].backward_input_seconds);
          if (j > 0) {
            place.backward_link = std::max(place.backward_link, place.now) + stages[j - 1].transfer_seconds;
            gradients[j - 1][place.backwards] = place.backward_link;
            ++sent_backward[j];
          }
          ++place.backwards;
        }
        ++place.next;
        moved = true;
      }
    }
  }
  double end = 0;
  for (std::size_t j = 0; j < count; ++j) {
    end = std::max(end, places[j].next < sequences[j]->size() ? kNone : places[j].now);
  }
  return end;
}

double fastestSchedule(const std::vector<StageTimes>& stages, int microbatches, const std::vector<int>& limits,
                       bool split, double known) {
  std::vector<std::vector<Sequence>> choices;
  for (const int limit : limits) {
    choices.push_back(allSequences(microbatches, limit, split));
  }
  std::vector<std::size_t> chosen(stages.size(), 0);
  std::vector<const Sequence*> sequences(stages.size());
  double best = kNone;
  while (best > known) {
    for (std::size_t j = 0; j < stages.size(); ++j) {
      sequences[j] = &choices[j][chosen[j]];
    }
    best = std::min(best, playedSeconds(stages, sequences));
    std::size_t digit = 0;
    while (digit < chosen.size() && ++chosen[digit] == choices[digit].size()) {
      chosen[digit++] = 0;
    }
    if (digit == chosen.size()) {
      break;
    }
  }
  return best;
}

}  // namespace torchext::core::testing
