// PipelineCandidates are the searches that a plan chooses from: one for each number of stages and each family.
//
// It owns their costs, one for each data width. Numbers of stages that cannot be are kept with the reason.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/pipeline/family_search.h"
#include "core/pipeline/pipeline_options.h"
#include "core/pipeline/pipeline_profile.h"

namespace torchext::core {

struct RefusedShape {
  std::string name;  // "8 stages x 2", "8 stages x 2, zero-bubble"
  std::string reason;
};

// An order, and the search that found it.
struct FoundOrder {
  StageOrder order;
  FamilySearch* search = nullptr;
};

class PipelineCandidates {
 public:
  // All three outlive it. std::invalid_argument on bad ones, and where no number of stages can be.
  PipelineCandidates(const std::vector<PipelineLayer>& layers, const PipelineLink& link,
                     const PipelineOptions& options);

  // The best of all, of searches that have one. None: memory is too small, or nothing is as fast as `below`.
  std::optional<FoundOrder> best(double memory_bytes, double below, SearchEffort effort);

  std::vector<FamilySearch>& searches() { return searches_; }
  const std::vector<RefusedShape>& refused() const { return refused_; }
  // What the least memory of any search would be, and whose.
  const FamilySearch& leastDemanding() const;
  bool exhaustive() const;

 private:
  void addShape(int stages, int data, StageRules rules);
  std::string whyNot(int stages, int data) const;

  const std::vector<PipelineLayer>& layers_;
  const PipelineLink& link_;
  const PipelineOptions& options_;
  std::map<int, std::unique_ptr<StageCosts>> costs_;  // by data width
  std::vector<FamilySearch> searches_;
  std::vector<RefusedShape> refused_;
};

}  // namespace torchext::core
