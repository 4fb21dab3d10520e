#include "kfac/comm/delivery.h"

#include <algorithm>
#include <set>

#include "kfac/comm/communicator.h"

namespace torchext {

bool Delivery::comesTo(int rank, std::size_t parcel) const {
  const std::vector<int>& to = parcels_[parcel].to;
  return std::find(to.begin(), to.end(), rank) != to.end();
}

void MessageDelivery::begin(std::size_t count) {
  Delivery::begin(count);
  coming_.assign(count, Work());
  for (std::size_t i = 0; i < count; ++i) {
    const Parcel& parcel = parcels()[i];
    if (comesTo(communicator_.rank(), i)) {
      coming_[i] = communicator_.receive(parcel.slice, parcel.from, parcel.tag);
    }
  }
}

// To each receiver directly: what all ranks send together is no more than in a tree, and nothing waits in the order of
// collectives. Gloo hands its collectives to threads of its own, which on a machine without spare cores takes longer
// than the transfer.
void MessageDelivery::ready(std::size_t parcel) {
  if (parcel < count()) {
    const Parcel& own = parcels()[parcel];
    for (const int to : own.to) {
      going_.push_back(communicator_.send(own.slice, to, own.tag));
    }
  }
}

void MessageDelivery::wait(std::size_t parcel) {
  if (coming_[parcel]) {
    coming_[parcel]->wait();
    coming_[parcel].reset();
  }
}

void MessageDelivery::finish() {
  for (std::size_t i = 0; i < coming_.size(); ++i) {
    wait(i);
  }
  for (const Work& work : going_) {
    work->wait();
  }
  going_.clear();
}

// Parcels of a rank that lie next to each other are one part. What several ranks have alike comes from the first one.
void CopyDelivery::flush() {
  std::vector<std::vector<at::Tensor>> parts(static_cast<std::size_t>(ranks_));
  std::set<std::int64_t> listed;
  std::size_t copies = 0;
  for (std::size_t i = 0; i < count(); ++i) {
    const at::Tensor& slice = parcels()[i].slice;
    if (!listed.insert(slice.storage_offset()).second) {
      continue;
    }
    auto& own = parts[static_cast<std::size_t>(parcels()[i].from)];
    if (!own.empty() && own.back().storage_offset() + own.back().numel() == slice.storage_offset()) {
      const at::Tensor& before = own.back();
      own.back() = before.as_strided({before.numel() + slice.numel()}, {1}, before.storage_offset());
    } else {
      own.push_back(slice);
    }
    copies = std::max(copies, own.size());
  }
  for (std::size_t copy = 0; copy < copies; ++copy) {
    std::vector<at::Tensor> together;
    together.reserve(parts.size());
    for (const auto& own : parts) {
      together.push_back(copy < own.size() ? own[copy] : at::Tensor());
    }
    copy_(together);
  }
}

void GroupedDelivery::flush() {
  std::vector<Message> messages;
  for (std::size_t i = 0; i < count(); ++i) {
    const Parcel& parcel = parcels()[i];
    if (comesTo(rank_, i)) {
      messages.push_back({parcel.slice, parcel.from, parcel.tag, /*sends=*/false});
    }
    for (const int to : parcel.to) {
      if (parcel.from == rank_) {
        messages.push_back({parcel.slice, to, parcel.tag, /*sends=*/true});
      }
    }
  }
  if (!messages.empty()) {
    for (const Work& work : start_(messages)) {
      work->wait();
    }
  }
}

}  // namespace torchext
