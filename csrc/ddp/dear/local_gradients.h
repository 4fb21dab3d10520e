// LocalGradients knows which gradients are this rank's alone, and refuses a step with them.
//
// What a backward pass adds inside no_sync(), or of a forward pass beside DistributedDataParallel's, is local until a
// pass that averages has used it. In the sharded form the parameters' own gradients are local again after a step.
// A gradient is known by its memory: what a script puts in its place is the script's.
//
// Threads: autograd's in a backward pass, otherwise the training thread.
#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace torchext {

class LocalGradients {
 public:
  // parameters, names: outlive this.
  LocalGradients(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names)
      : parameters_(parameters), names_(names), memory_(parameters.size(), nullptr) {}

  // That of this parameter, as it is now; one that is not dense, or that a hook has taken away, is not known.
  void note(std::size_t parameter);
  void noteAll();
  void averaged(std::size_t parameter) { memory_[parameter] = nullptr; }
  void allAveraged() { memory_.assign(memory_.size(), nullptr); }
  // Throws if one of them is still its parameter's, and not zero: ranks would step apart.
  void checkStep() const;

  // [parameter] of a gradient that is this rank's alone.
  const std::vector<const void*>& memory() const { return memory_; }

 private:
  const std::vector<at::Tensor>& parameters_;
  const std::vector<std::string>& names_;
  std::vector<const void*> memory_;
};

}  // namespace torchext
