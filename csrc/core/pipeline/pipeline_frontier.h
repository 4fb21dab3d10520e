// pipeline_frontier keeps which plans are worth their memory: a point is kept if none has as little memory and time.
#pragma once

#include <vector>

#include "core/pipeline/pipeline_plan.h"

namespace torchext::core {

class PipelineFrontier {
 public:
  // False: another is as good in both.
  bool add(FrontierPoint point);
  // Memory rises, time falls strictly.
  const std::vector<FrontierPoint>& points() const { return points_; }

 private:
  std::vector<FrontierPoint> points_;
};

}  // namespace torchext::core
