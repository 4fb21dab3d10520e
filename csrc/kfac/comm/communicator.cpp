#include "kfac/comm/communicator.h"

#include <c10/util/Exception.h>

namespace torchext {

void Communicator::Sum::wait() {
  for (std::size_t i = 0; i < works_.size(); ++i) {
    works_[i]->wait();
    if (slice_.defined()) {
      slice_.add_(shares_.select(0, static_cast<std::int64_t>(i)));
    }
  }
  *this = Sum();
}

void Communicator::gather(const at::Tensor& all, int tag) {
  std::vector<Work> works;
  for (int distance = 1; distance < size(); ++distance) {
    const int from = (rank() + size() - distance) % size();
    works.push_back(receive(all.narrow(0, from, 1), from, tag));
    works.push_back(send(all.narrow(0, rank(), 1), (rank() + distance) % size(), tag));
  }
  for (const Work& work : works) {
    work->wait();
  }
}

void Communicator::sumAtOnce(const at::Tensor& /*data*/, const std::vector<core::Span>& /*spans*/) {
  TORCH_INTERNAL_ASSERT(sumsAtOnce(), "sums travel one by one here");
}

std::unique_ptr<Delivery> Communicator::deliver(std::vector<Delivery::Parcel> parcels) {
  return std::make_unique<MessageDelivery>(*this, std::move(parcels));
}

RowLinks Communicator::rowLinks() {
  return {.rank = rank(),
          .ranks = size(),
          .send = [this](const at::Tensor& rows, int to, int tag) { return send(rows, to, tag); },
          .receive = [this](const at::Tensor& rows, int from, int tag) { return receive(rows, from, tag); },
          .gather = nullptr};
}

}  // namespace torchext
