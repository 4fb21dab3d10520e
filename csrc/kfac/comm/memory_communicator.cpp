#include "kfac/comm/memory_communicator.h"

#include <utility>

namespace torchext {

MemoryCommunicator::MemoryCommunicator(MessageCommunicator&& messages, std::unique_ptr<WindowGather> windows)
    : MessageCommunicator(std::move(messages)), windows_(std::move(windows)) {
  manner_ = {.overlaps = false, .sums_at_once = true, .adds_shares = false};
}

void MemoryCommunicator::copyParts(const std::vector<at::Tensor>& parts) {
  checkUsable();
  std::vector<WindowGather::Part> all(parts.size());
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].defined() && parts[rank].numel() > 0) {
      TORCH_INTERNAL_ASSERT(parts[rank].is_contiguous() && parts[rank].is_cpu());
      all[rank] = {static_cast<std::byte*>(parts[rank].data_ptr()), parts[rank].nbytes()};
    }
  }
  bytes_.shared += static_cast<std::int64_t>(all[static_cast<std::size_t>(rank())].bytes);
  windows_->run(all);
}

void MemoryCommunicator::gather(const at::Tensor& all, int /*tag*/) { copyParts(all.unbind()); }

void MemoryCommunicator::sumAtOnce(const at::Tensor& data, const std::vector<core::Span>& spans) {
  checkUsable();
  TORCH_INTERNAL_ASSERT(data.is_contiguous() && data.is_cpu());
  bytes_.shared += static_cast<std::int64_t>(data.nbytes());
  windows_->sum({static_cast<std::byte*>(data.data_ptr()), data.nbytes()}, reductionFor(data.scalar_type()), spans);
}

Communicator::Sum MemoryCommunicator::addUp(const at::Tensor& numbers) {
  sumAtOnce(numbers, {{0, static_cast<std::size_t>(numbers.numel())}});
  return {};
}

void MemoryCommunicator::bring(Parcels parcels) {
  for (const std::vector<at::Tensor>& parts : copiesOf(parcels)) {
    copyParts(parts);
  }
}

RowLinks MemoryCommunicator::rowLinks() {
  return {.rank = rank(),
          .ranks = size(),
          .send = nullptr,
          .receive = nullptr,
          .gather = [this](const std::vector<at::Tensor>& parts) { copyParts(parts); }};
}

// What everybody writes, everybody reads: parts of 1 KiB to 256 KiB a rank, bytes are those of all ranks.
void MemoryCommunicator::measure(at::Device device, std::size_t /*most*/, core::KfacCosts& costs) {
  constexpr int kRepeats = 5;
  const ExchangeBytes counted = bytes_;
  std::vector<std::size_t> bytes;
  std::vector<double> seconds;
  for (const std::int64_t elements : {1LL << 8, 1LL << 12, 1LL << 16}) {
    const at::Tensor data = at::zeros({size(), elements}, at::kFloat);
    const auto parts = data.unbind();
    mean(0);  // all begin together
    seconds.push_back(fastestSeconds(device, kRepeats, [&] { copyParts(parts); }));
    bytes.push_back(data.nbytes());
  }
  const core::AlphaBeta sharing = fitted(bytes, std::move(seconds));
  bytes_ = counted;
  costs.sharing = sharing;
  costs.broadcast = sharing;
  costs.all_reduce = {sharing.alpha, size() * sharing.beta};
}

}  // namespace torchext
