// Delivery brings parcels to ranks that wait for them: slices of a buffer that lie at the same place on all ranks.
//
// The list of parcels is planned once, the same on all ranks, and is brought again and again. A round is begin(), then
// ready() for each parcel of this rank's own, flush(), and wait() for parcels of others, finish(). A parcel that
// travels as a message leaves in ready() and may be waited for at once. Parcels that travel together leave in flush(),
// which all ranks call, and are there afterwards.
//
// Threads: the owner's calls under a lock of its own. begin() and ready() never block.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace torchext {

class Communicator;

class Delivery {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Parcel {
    at::Tensor slice;
    int from = 0;
    std::vector<int> to;
    int tag = 0;
  };

  virtual ~Delivery() = default;
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

  // A round of the first `count` parcels: asks for what will come here.
  virtual void begin(std::size_t count) { count_ = count; }
  // This rank's own parcel is complete. Nothing where it is not in this round.
  virtual void ready(std::size_t /*parcel*/) {}
  // What travels together leaves, and is here afterwards.
  virtual void flush() {}
  // Until a parcel of another rank is here, after flush() or, where it is a message, before. Twice is harmless.
  virtual void wait(std::size_t /*parcel*/) {}
  // Until all are here, and the own ones have left.
  virtual void finish() {}

 protected:
  explicit Delivery(std::vector<Parcel> parcels) : parcels_(std::move(parcels)) {}

  const std::vector<Parcel>& parcels() const { return parcels_; }
  std::size_t count() const { return count_; }
  // Whether a parcel is for this rank.
  bool comesTo(int rank, std::size_t parcel) const;

 private:
  std::vector<Parcel> parcels_;
  std::size_t count_ = 0;
};

// A message for each parcel and receiver.
class MessageDelivery final : public Delivery {
 public:
  // communicator: outlives this.
  MessageDelivery(Communicator& communicator, std::vector<Parcel> parcels)
      : Delivery(std::move(parcels)), communicator_(communicator) {}
  void begin(std::size_t count) override;
  void ready(std::size_t parcel) override;
  void wait(std::size_t parcel) override;
  void finish() override;

 private:
  Communicator& communicator_;
  std::vector<Work> coming_;  // [parcel] null: not to this rank, or here
  std::vector<Work> going_;
};

// All parcels at once, by a call that copies a part of each rank to all.
class CopyDelivery final : public Delivery {
 public:
  // parts[rank]: contiguous, of the same sizes on all ranks; undefined: it has none.
  using Copy = std::function<void(const std::vector<at::Tensor>& parts)>;
  CopyDelivery(int ranks, Copy copy, std::vector<Parcel> parcels)
      : Delivery(std::move(parcels)), ranks_(ranks), copy_(std::move(copy)) {}
  void flush() override;

 private:
  int ranks_;
  Copy copy_;
};

// All parcels at once, as one group of messages.
class GroupedDelivery final : public Delivery {
 public:
  struct Message {
    at::Tensor slice;
    int peer = 0;
    int tag = 0;
    bool sends = false;  // else it is received
  };
  // Starts messages together; two ranks list theirs in the same order.
  using Start = std::function<std::vector<Work>(const std::vector<Message>& messages)>;
  GroupedDelivery(int rank, Start start, std::vector<Parcel> parcels)
      : Delivery(std::move(parcels)), rank_(rank), start_(std::move(start)) {}
  void flush() override;

 private:
  int rank_;
  Start start_;
};

}  // namespace torchext
