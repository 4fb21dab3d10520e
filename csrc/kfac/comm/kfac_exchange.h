// The collectives of K-FAC: slices of flat buffers over one c10d group, counted.
//
// The group belongs to K-FAC alone, so that its collectives never come between those of DDP; every rank must start them
// in the same order. Tensors may be on an accelerator (then Work::wait() holds up its current stream, not the host),
// where the group needs a backend for it beside one for the CPU: what the host decides by goes as CPU tensors, past
// what is queued. Nothing here waits but wait(), agree(), fromRankZero(), gatherParts(), sumParts() and the
// measurements. A group of one rank needs no object of this class. Threads: the caller's lock; the calls come without
// the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "c10d/transport/agreement.h"
#include "c10d/transport/window_gather.h"
#include "core/kfac/kfac_costs.h"
#include "kfac/comm/exchange_waits.h"

namespace torchext {

// Bytes of the tensors this rank passed to collectives, by kind; of a broadcast and a reduce on every rank, of messages
// on the sender. shared: that it wrote for others into memory of the host.
struct ExchangeBytes {
  std::int64_t all_reduce = 0;
  std::int64_t reduce = 0;
  std::int64_t broadcast = 0;
  std::int64_t sent = 0;
  std::int64_t shared = 0;
};

class KfacExchange {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  // model: of the model's group; null where that is none of torchext's.
  KfacExchange(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<GroupHealth> model);

  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }

  // A sum on its way.
  class Sum {
   public:
    // Afterwards the slice holds the sum, on all ranks or on the root (elsewhere it is undefined). Twice is harmless.
    void wait();

   private:
    friend class KfacExchange;
    std::vector<Work> works_;
    at::Tensor slice_;   // of the root, if it adds the shares itself
    at::Tensor shares_;  // [ranks - 1, elements]
  };
  Sum allReduce(at::Tensor slice);
  // On the CPU every rank sends its slice to the root, which adds them in the order of ranks: sums for several roots
  // then share the links, where Gloo's reduce, a reduce-scatter and a gather, takes as long as its all-reduce for each.
  // `shares` of the root: (ranks - 1) times the elements of slice, untouched by others until the sum was waited for.
  // On an accelerator it is the backend's reduce.
  Sum reduce(at::Tensor slice, int root, int tag, const at::Tensor& shares);
  Work broadcast(at::Tensor slice, int root);
  Work send(at::Tensor slice, int to, int tag);
  Work receive(at::Tensor slice, int from, int tag);
  // Messages that are started together. On an accelerator they must be: NCCL knows no tags and keeps the order between
  // two ranks, so that single ones would wait for each other, and two ranks must list theirs in the same order.
  struct Message {
    at::Tensor slice;
    int peer = 0;
    int tag = 0;
    bool sends = false;  // else it is received
  };
  std::vector<Work> start(const std::vector<Message>& messages);
  // Every rank's element of all[ranks] to every other, point to point: apart from the order of collectives.
  std::vector<Work> gather(const at::Tensor& all, int tag);
  static void wait(std::vector<Work>& works);

  // Collective, once: from now on gatherParts() and sumParts() may be called, if all ranks are on one host and can map
  // each other's memory. The same answer on all ranks, as sharesMemory().
  void shareMemory();
  bool sharesMemory() const { return gather_ != nullptr; }
  // Every rank's part to every other through that memory; blocks. parts[rank]: contiguous CPU tensors of the same sizes
  // on all ranks, undefined or empty: it has none.
  void gatherParts(const std::vector<at::Tensor>& parts);
  // Sums over ranks through it; blocks. data: contiguous, on the CPU, of one size everywhere. Afterwards its `spans`
  // (elements, ascending; each rank's own choice) hold the sums, bit for bit the same on all ranks.
  void sumParts(const at::Tensor& data, const std::vector<core::Span>& spans);
  // Collective: as measure(), of parts of 1 KiB to 256 KiB a rank; bytes are those of all ranks.
  std::vector<core::CommSample> measureSharing();

  // Collective; throws c10::DistBackendError on every rank unless the fields are the same everywhere.
  void agree(const AgreementFields& fields);
  // Collective: a few timed all-reduces and broadcasts of 4 KiB to 4 MiB on that device, the larger ones only if as
  // much as `most` bytes will ever travel; the same samples on all ranks.
  void measure(at::Device device, std::size_t most, std::vector<core::CommSample>& all_reduce,
               std::vector<core::CommSample>& broadcast);
  // Collective, not counted: the mean over ranks.
  double mean(double value);
  // Collective: rank 0's numbers, to all.
  std::vector<double> fromRankZero(const std::vector<double>& values);

  const ExchangeBytes& bytes() const { return bytes_; }
  void resetBytes() { bytes_ = {}; }

  // Its waits: for those that wait for a thread which waits for works.
  const std::shared_ptr<ExchangeWaits>& waits() const { return waits_; }

 private:
  AgreementGroup agreement();

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<ExchangeWaits> waits_;
  std::unique_ptr<WindowGather> gather_;
  ExchangeBytes bytes_;
};

}  // namespace torchext
