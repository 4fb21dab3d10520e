#include "core/auto/iteration_simulator.h"

#include <algorithm>
#include <cstddef>

#include "core/base/check.h"
#include "core/base/enum_names.h"

namespace torchext::core {
namespace {

constexpr EnumNames<Activity, 6> kActivities{{{Activity::kForward, "forward"},
                                              {Activity::kBackward, "backward"},
                                              {Activity::kUnpack, "unpack"},
                                              {Activity::kOptimizer, "optimizer"},
                                              {Activity::kReduce, "reduce"},
                                              {Activity::kGather, "gather"}}};

class Timeline {
 public:
  Timeline(std::vector<TimelineSpan>& spans, bool kept) : spans_(spans), kept_(kept) {}
  // Returns the end.
  double add(Activity activity, int item, double begin, double seconds) {
    if (kept_ && seconds > 0) {
      spans_.push_back({activity, item, begin, begin + seconds});
    }
    return begin + seconds;
  }

 private:
  std::vector<TimelineSpan>& spans_;
  bool kept_;
};

// Those that gather, by first use; without any they come last.
std::vector<const BucketMessage*> gatherOrder(const std::vector<BucketMessage>& messages) {
  std::vector<const BucketMessage*> order;
  for (const BucketMessage& message : messages) {
    if (message.gathers) {
      order.push_back(&message);
    }
  }
  std::stable_sort(order.begin(), order.end(), [](const BucketMessage* a, const BucketMessage* b) {
    return static_cast<unsigned>(a->first_use) < static_cast<unsigned>(b->first_use);  // -1 is the largest
  });
  return order;
}

}  // namespace

const char* toString(Activity activity) { return enumName(kActivities, "Activity", activity); }

Iteration simulateIteration(const ComputeSpans& compute, const std::vector<BucketMessage>& messages,
                            bool with_timeline) {
  Iteration result;
  Timeline timeline(result.timeline, with_timeline);
  double link = 0;  // free from then on

  std::vector<double> arrival(compute.forward_seconds.size(), 0.0);  // [span] of all that it reads
  for (const BucketMessage* message : gatherOrder(messages)) {
    link = timeline.add(Activity::kGather, message->item, link, message->gather_seconds);
    if (message->first_use >= 0) {
      arrival.at(index(message->first_use)) = link;
    }
  }

  double now = 0;
  for (std::size_t span = 0; span < arrival.size(); ++span) {
    const double begin = std::max(now, arrival[span]);
    result.exposed_gather_seconds += begin - now;
    now = timeline.add(Activity::kForward, static_cast<int>(span), begin, compute.forward_seconds[span]);
  }
  const double backward_begin = now;
  const double backward_end = timeline.add(Activity::kBackward, 0, now, compute.backward_seconds);

  double unpacked = backward_end;
  for (const BucketMessage& message : messages) {
    const double begin = std::max(link, backward_begin + message.ready_seconds);
    link = timeline.add(Activity::kReduce, message.item, begin, message.reduce_seconds);
    unpacked = timeline.add(Activity::kUnpack, message.item, std::max(unpacked, link), message.unpack_seconds);
  }
  result.exposed_reduce_seconds = unpacked - backward_end;
  result.step_seconds = timeline.add(Activity::kOptimizer, 0, unpacked, compute.optimizer_seconds);
  return result;
}

}  // namespace torchext::core
