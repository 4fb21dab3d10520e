// MemoryCommunicator exchanges through memory of a host, where all ranks can map each other's.
//
// All parts of a kind go at once, in a call that blocks (window_gather.h): that takes tens of microseconds, less than
// the threads of sockets would take from the backward pass. Collectives and single messages stay those of the group.
//
// Threads, errors: as communicator.h.
#pragma once

#include <memory>
#include <vector>

#include "kfac/comm/message_communicator.h"

namespace torchext {

class MemoryCommunicator final : public MessageCommunicator {
 public:
  // Goes on with what `messages` has counted. windows: of its shareMemory().
  MemoryCommunicator(MessageCommunicator&& messages, std::unique_ptr<WindowGather> windows);

  void gather(const at::Tensor& all, int tag) override;
  Sum addUp(const at::Tensor& numbers) override;
  void sumAtOnce(const at::Tensor& data, const std::vector<core::Span>& spans) override;
  void bring(Parcels parcels) override;
  RowLinks rowLinks() override;
  void measure(at::Device device, std::size_t most, core::KfacCosts& costs) override;

 private:
  // Every rank's part to every other. parts[rank]: contiguous CPU tensors of the same sizes on all ranks, undefined or
  // empty: it has none.
  void copyParts(const std::vector<at::Tensor>& parts);

  std::unique_ptr<WindowGather> windows_;
};

}  // namespace torchext
