// TensorsInPlace: an attached model's own tensors, and where they lived when it was attached.
//
// Buckets alias the tensors' memory. A model that is given other memory afterwards would go on training with tensors
// that nobody averages.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

namespace torchext {

class TensorsInPlace {
 public:
  // In order of registration: parameters, then buffers.
  TensorsInPlace(std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& buffers)
      : tensors_(std::move(parameters)) {
    tensors_.insert(tensors_.end(), buffers.begin(), buffers.end());
    for (const at::Tensor& tensor : tensors_) {
      addresses_.push_back(tensor.data_ptr());
    }
  }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  // c10::Error that names the first tensor whose memory is another.
  void check(const std::string& backend) const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      TORCH_CHECK(tensors_[i].data_ptr() == addresses_[i], backend, ": parameter or buffer ", i,
                  " (in order of registration) has been given other memory since torchext.attach (model.to(), .data = "
                  "...); change a model before it is wrapped in DistributedDataParallel and attached");
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<const void*> addresses_;
};

}  // namespace torchext
