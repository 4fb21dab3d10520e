// ProcessGroupDear: the backend named "dear" (Zhang et al., "DeAR: Accelerating Distributed Deep Learning with
// Fine-Grained All-Reduce Pipelining", ICDCS 2023).
//
// Every collective is DelegatingBackend's: exact, over all ranks. Models are trained through torchext.attach(): their
// gradients are reduce-scattered under the backward pass, and what comes of them is gathered under the next forward
// pass; see csrc/ddp/dear/dear_synchronizer.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "c10d/backend/attachable_backend.h"

namespace torchext {

class ProcessGroupDear : public AttachableBackend {
 public:
  // Ranges are checked by validate(), before any communication.
  struct Options : GroupOptions {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : GroupOptions("dear", timeout) {}

    std::string form = "replicated";  // "replicated": gradients are gathered, every rank steps everything;
                                      // "sharded": the optimizer steps slices, parameters are gathered
    double bucket_mb = 0;             // MiB of a bucket, 0.001..4096; 0: tuned while training
    bool allreduce_fallback = true;   // train as plain DDP where that is measured to be faster
    std::string transport = "auto";   // "auto": on the CPU by point-to-point, on CUDA by NCCL's collectives;
                                      // "collectives": on the CPU by Gloo's, too

    // Throws c10::ValueError with the option's name, its value and the allowed range.
    void validate() const;
    // NOLINTNEXTLINE(modernize-use-override): the options of torch 2.11 have none to override.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }
  };

  ProcessGroupDear(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options);
  ~ProcessGroupDear() override;

  const Options& dearOptions() const { return *dear_options_; }

 protected:
  c10::intrusive_ptr<c10d::Backend> createChild(int rank, int size, InnerBackends inner,
                                                c10::intrusive_ptr<c10d::Backend::Options> options) override;

 private:
  c10::intrusive_ptr<Options> dear_options_;
};

}  // namespace torchext
