// MessageCommunicator exchanges slices of flat buffers over one c10d group of CPUs, counted.
//
// Every wait is that of exchange_waits.h: it sees signals and the failure of the model's group. Tensors of a device are
// handed to the group's backend for it, whose waits hold up the current stream; DeviceCommunicator builds on that.
//
// Threads, errors: as communicator.h.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "c10d/transport/window_gather.h"
#include "kfac/comm/communicator.h"
#include "kfac/comm/exchange_waits.h"

namespace torchext {

class MessageCommunicator : public Communicator {
 public:
  // model: of the model's group; null where that is none of torchext's.
  MessageCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<GroupHealth> model,
                      Manner manner = {});

  Sum allReduce(at::Tensor slice) override;
  Sum reduce(at::Tensor slice, int root, int tag, const at::Tensor& shares) override;
  Work broadcast(at::Tensor slice, int root) override;
  Work send(at::Tensor slice, int to, int tag) override;
  Work receive(at::Tensor slice, int from, int tag) override;
  void agree(const AgreementFields& fields) override;
  double mean(double value) override;
  std::vector<double> fromRankZero(const std::vector<double>& values) override;
  void measure(at::Device device, std::size_t most, core::KfacCosts& costs) override;
  std::function<void()> watch() const override;

  // Collective, once: windows onto the memory of all ranks, if all are on one host and can map it; else null, on all.
  std::unique_ptr<WindowGather> shareMemory();

 protected:
  MessageCommunicator(MessageCommunicator&&) = default;

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  void checkUsable() const { waits_->checkUsable(); }
  // Collective: what transfers of these sizes cost, by the seconds of rank 0.
  core::AlphaBeta fitted(const std::vector<std::size_t>& bytes, std::vector<double> seconds);

 private:
  AgreementGroup agreement();

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<ExchangeWaits> waits_;
};

// The seconds of the fastest of some calls, each waited for on that device.
double fastestSeconds(at::Device device, int repeats, const std::function<void()>& call);

}  // namespace torchext
