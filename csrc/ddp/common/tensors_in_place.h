// TensorsInPlace: an attached model's own tensors, where they lived when it was attached, and which of them the user
// has written.
//
// Buckets alias the tensors' memory. A tensor that is given other memory afterwards (.data = ...) gets its own back,
// with the values of the other: takeBack().
//
// An average that is under way takes the place of what was packed. What the user writes into parameters meanwhile must
// outlive that; versions tell of it, at the price of reading one number a tensor. A tensor that is written now and then
// (load_state_dict) keeps what was written, and does without this one average: nobody has kept what it held before. One
// that was written in the round before as well (weights that are clipped after every step) would never be averaged: of
// it the round keeps what is packed, and what was written is added to the average as a difference.
// A round: note() when it begins, mayBeWritten() when it packs, endRound() when the average is there.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace torchext {

enum class Write : char { kNone, kNow, kAgain };  // kAgain: in the round before as well

class TensorsInPlace {
 public:
  // In order of registration: parameters, then buffers.
  TensorsInPlace(std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& buffers)
      : tensors_(std::move(parameters)) {
    tensors_.insert(tensors_.end(), buffers.begin(), buffers.end());
    for (const at::Tensor& tensor : tensors_) {
      kept_.push_back(tensor.detach());
    }
    versions_.resize(tensors_.size());
    written_before_.resize(tensors_.size());
  }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }

  // What is written from here on counts.
  void note() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      versions_[i] = versionOf(i);
    }
  }
  bool mayBeWritten(std::size_t index) const { return written_before_[index] != 0; }
  // Since note().
  Write write(std::size_t index) const {
    if (versions_[index] == versionOf(index)) {
      return Write::kNone;
    }
    return mayBeWritten(index) ? Write::kAgain : Write::kNow;
  }
  // The same of all tensors, to be called before the average is written into them.
  std::vector<Write> endRound() {
    std::vector<Write> writes;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      writes.push_back(write(i));
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      written_before_[i] = writes[i] == Write::kNone ? 0 : 1;
    }
    return writes;
  }

  // Before tensors are packed. c10::Error that names the first tensor that is of another shape, dtype or device now, or
  // a parameter in another order: DDP's reducer writes gradients by the strides that parameters had, and, where it has
  // a hook, reads them by those that they have.
  void takeBack(const std::string& backend) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      at::Tensor& kept = kept_[i];
      if (tensors_[i].data_ptr() == kept.data_ptr()) {
        continue;
      }
      TORCH_CHECK(tensors_[i].sizes() == kept.sizes() && tensors_[i].options().type_equal(kept.options()) &&
                      tensors_[i].device() == kept.device() &&
                      (!tensors_[i].requires_grad() || sameOrder(tensors_[i], kept)),
                  backend, ": parameter or buffer ", i,
                  " (in order of registration) has been given other memory since torchext.attach (model.to(), .data = "
                  "...) of another kind: it is ",
                  tensors_[i].toString(), tensors_[i].sizes(), " with strides ", tensors_[i].strides(), ", and was ",
                  kept.toString(), kept.sizes(), " with strides ", kept.strides(),
                  "; change a model before it is wrapped in DistributedDataParallel and attached");
      kept.copy_(tensors_[i]);
      tensors_[i].set_data(kept);
    }
  }

 private:
  // Of tensors of one shape.
  static bool sameOrder(const at::Tensor& one, const at::Tensor& other) {
    for (std::int64_t dim = 0; dim < one.dim(); ++dim) {
      if (one.size(dim) > 1 && one.stride(dim) != other.stride(dim)) {
        return false;
      }
    }
    return true;
  }

  // Tensors of inference mode have none, and cannot be written outside of it.
  std::uint32_t versionOf(std::size_t index) const {
    return tensors_[index].is_inference() ? 0
                                          : tensors_[index].unsafeGetTensorImpl()->version_counter().current_version();
  }

  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> kept_;         // with the memory that they had when the model was attached
  std::vector<std::uint32_t> versions_;  // as noted
  std::vector<char> written_before_;     // in the round before
};

}  // namespace torchext
