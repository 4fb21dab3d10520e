// ReplicatedForm gathers averaged gradients after the backward pass, and makes them the parameters' own.
//
// The paper's form: every rank steps each parameter before the forward pass needs it, with whole gradients. A gathered
// gradient takes the memory of the local one (gradient()), and becomes it when somebody looks (settleGradient()).
// A script that has kept a reference to the local gradient, and changes it meanwhile, is told (checkStep()).
//
// Threads: as DearForm; gradient() and settleGradient() on the training thread. take() runs on the thread of
// exchanges_, until its bucket is gathered; whole_ of the bucket's tensors is that thread's until then.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "ddp/dear/backward_pass.h"
#include "ddp/dear/bucket_exchanges.h"
#include "ddp/dear/dear_form.h"

namespace torchext {

class ReplicatedForm : public DearForm {
 public:
  // All outlive this.
  ReplicatedForm(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                 const BackwardPass& pass, BucketExchanges& exchanges);

  // The averaged gradient, valid until the next backward pass; what is given for a step stays when the gradients are
  // cleared after it. Waits for it; none when no rank has one.
  std::optional<at::Tensor> gradient(std::size_t parameter);
  // Makes it the parameter's own.
  void settleGradient(std::size_t parameter);

  void backwardBegins() override;
  void backwardEnds() override;
  void beforeAccumulation(std::size_t parameter) override;
  void checkStep() const override;
  void afterStep() override {}
  void clearGradients() override {}

 private:
  void noteVersions();
  void checkVersion(std::size_t parameter) const;
  void gatherGradients();
  void take(std::size_t bucket, const std::vector<at::Tensor>& locals);

  const std::vector<at::Tensor>& parameters_;
  const std::vector<std::string>& names_;
  const BackwardPass& pass_;
  BucketExchanges& exchanges_;
  bool gathered_ = false;                                       // the last pass' are being gathered, or there
  std::vector<at::Tensor> whole_;                               // [parameter] gathered gradients; undefined: none
  std::vector<char> settled_;                                   // [parameter] its own gradient is the gathered one
  std::vector<std::pair<const void*, std::int64_t>> versions_;  // [parameter] of .grad after the backward pass
};

}  // namespace torchext
