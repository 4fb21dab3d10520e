// Communicator brings what ranks make to the other ranks, in a group that K-FAC has for itself.
//
// Three implementations. MessageCommunicator sends messages between CPUs. MemoryCommunicator copies through memory that
// all ranks of one host map. DeviceCommunicator hands tensors to the collectives of an accelerator. Who uses a
// Communicator does not ask which one it has. What differs is a virtual call, or a value that stands from the start:
//
//   call or value    messages                     memory                        device
//   overlaps()       what is made leaves, while   all ranks exchange at once,   all messages start together,
//                    more is made                 in step()                     once all is queued
//   sumsAtOnce()     no: factors in buckets       yes: by sumAtOnce()           no
//   addsShares()     a root adds what others      no                            only of tensors on the CPU
//                    have sent
//   bring()          a message for each parcel    a copy for all parcels        one group of messages
//   gather(), addUp()  messages, all-reduce       copies                        messages, all-reduce
//
// The group's collectives never come between those of DDP. Every rank starts them in the same order. What the host
// decides by travels as CPU tensors, past what a device has queued. A group of one rank needs no object of this class.
//
// Threads: the caller's lock; the calls come without the GIL. What start a transfer, or only ask, never block; bring(),
// gather(), sumAtOnce(), agree(), mean(), fromRankZero() and measure() do. Errors: c10::DistBackendError, and those of
// the group as they come.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/transport/agreement.h"
#include "c10d/transport/row_exchange.h"
#include "core/kfac/kfac_plan.h"
#include "core/transport/ring_plan.h"

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

class Communicator {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Manner {
    bool overlaps = true;
    bool sums_at_once = false;
    bool adds_shares = true;
  };

  // A slice of a buffer that lies at the same place on all ranks, from one of them to others.
  struct Parcel {
    at::Tensor slice;
    int from = 0;
    std::vector<int> to;
    int tag = 0;

    bool comesTo(int rank) const { return std::find(to.begin(), to.end(), rank) != to.end(); }
  };
  using Parcels = at::ArrayRef<Parcel>;

  // A sum on its way.
  class Sum {
   public:
    Sum() = default;
    // shares: [works, elements], each added to the slice once its work is done. Undefined: works bring the sum itself.
    explicit Sum(std::vector<Work> works, at::Tensor slice = {}, at::Tensor shares = {})
        : works_(std::move(works)), slice_(std::move(slice)), shares_(std::move(shares)) {}
    // Afterwards the slice holds the sum, on all ranks or on the root (elsewhere it is undefined). Twice is harmless.
    void wait();

   private:
    std::vector<Work> works_;
    at::Tensor slice_;
    at::Tensor shares_;
  };

  virtual ~Communicator() = default;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool overlaps() const { return manner_.overlaps; }
  bool sumsAtOnce() const { return manner_.sums_at_once; }
  bool addsShares() const { return manner_.adds_shares; }

  virtual Sum allReduce(at::Tensor slice) = 0;
  // On the CPU every rank sends its slice to the root, which adds them in the order of ranks: sums for several roots
  // then share the links, where Gloo's reduce, a reduce-scatter and a gather, takes as long as its all-reduce for each.
  // `shares` of the root: (ranks - 1) times the elements of slice, untouched by others until the sum was waited for.
  virtual Sum reduce(at::Tensor slice, int root, int tag, const at::Tensor& shares) = 0;
  virtual Work broadcast(at::Tensor slice, int root) = 0;
  virtual Work send(at::Tensor slice, int to, int tag) = 0;
  virtual Work receive(at::Tensor slice, int from, int tag) = 0;

  // Every rank's element of all[ranks] to every other: apart from the order of collectives.
  virtual void gather(const at::Tensor& all, int tag);
  // The sum over ranks of a few numbers, on the way that takes the least time.
  virtual Sum addUp(const at::Tensor& numbers) { return allReduce(numbers); }
  // Of a Communicator that sumsAtOnce(). data: contiguous, of one size everywhere. Afterwards its `spans` (elements,
  // ascending; each rank's own choice) hold the sums, bit for bit the same on all ranks.
  virtual void sumAtOnce(const at::Tensor& data, const std::vector<core::Span>& spans);
  // Collective: the same list on all ranks. Afterwards what comes here is here, and the own parcels have left.
  virtual void bring(Parcels parcels);
  // How the rows of batches travel; outlived by this object.
  virtual RowLinks rowLinks();

  // Collective; throws c10::DistBackendError on every rank unless the fields are the same everywhere.
  virtual void agree(const AgreementFields& fields) = 0;
  // Collective, not counted: the mean over ranks.
  virtual double mean(double value) = 0;
  // Collective: rank 0's numbers, to all.
  virtual std::vector<double> fromRankZero(const std::vector<double>& values) = 0;
  // Collective: what transfers cost, by a few that are timed on that device, the larger ones only if as much as `most`
  // bytes will ever travel; the same costs on all ranks. Leaves what inversions cost as it is.
  virtual void measure(at::Device device, std::size_t most, core::KfacCosts& costs) = 0;
  // What a thread calls now and then that waits for another one, which waits for works. Throws where no more will come.
  virtual std::function<void()> watch() const = 0;

  const ExchangeBytes& bytes() const { return bytes_; }

 protected:
  Communicator(int rank, int size, Manner manner) : manner_(manner), rank_(rank), size_(size) {}
  Communicator(Communicator&&) = default;
  // A message to each receiver directly: what all ranks send together is no more than in a tree, and nothing waits in
  // the order of collectives. Gloo hands its collectives to threads of its own, which on a machine without spare cores
  // takes longer than the transfer.
  std::vector<Work> start(Parcels parcels);
  // What to copy from each rank to all others, copy by copy: [copies][ranks], undefined where a rank has less.
  std::vector<std::vector<at::Tensor>> copiesOf(Parcels parcels) const;

  Manner manner_;
  ExchangeBytes bytes_;

 private:
  int rank_;
  int size_;
};

}  // namespace torchext
