#include "kfac/comm/communicator.h"

#include <set>

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

void Communicator::bring(Parcels parcels) {
  for (const Work& work : start(parcels)) {
    work->wait();
  }
}

std::vector<Communicator::Work> Communicator::start(Parcels parcels) {
  std::vector<Work> works;
  for (const Parcel& parcel : parcels) {
    if (parcel.comesTo(rank())) {
      works.push_back(receive(parcel.slice, parcel.from, parcel.tag));
    }
    for (const int to : parcel.to) {
      if (parcel.from == rank()) {
        works.push_back(send(parcel.slice, to, parcel.tag));
      }
    }
  }
  return works;
}

// Parcels of a rank that lie next to each other are one part. What several ranks have alike comes from the first one.
std::vector<std::vector<at::Tensor>> Communicator::copiesOf(Parcels parcels) const {
  std::vector<std::vector<at::Tensor>> copies;
  std::vector<std::size_t> parts(static_cast<std::size_t>(size()), 0);  // [rank] so far
  std::set<std::int64_t> listed;
  for (const Parcel& parcel : parcels) {
    if (!listed.insert(parcel.slice.storage_offset()).second) {
      continue;
    }
    const auto from = static_cast<std::size_t>(parcel.from);
    if (parts[from] > 0) {
      at::Tensor& before = copies[parts[from] - 1][from];
      if (before.storage_offset() + before.numel() == parcel.slice.storage_offset()) {
        before = before.as_strided({before.numel() + parcel.slice.numel()}, {1}, before.storage_offset());
        continue;
      }
    }
    if (parts[from] == copies.size()) {
      copies.emplace_back(parts.size());
    }
    copies[parts[from]++][from] = parcel.slice;
  }
  return copies;
}

RowLinks Communicator::rowLinks() {
  return {.rank = rank(),
          .ranks = size(),
          .send = [this](const at::Tensor& rows, int to, int tag) { return send(rows, to, tag); },
          .receive = [this](const at::Tensor& rows, int from, int tag) { return receive(rows, from, tag); },
          .gather = nullptr};
}

}  // namespace torchext
