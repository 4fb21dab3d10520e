// The rows of which the gradients of Linear layers are made, of all ranks.
//
// A mean gradient is a multiple of sum g a^T over the rows of all ranks' batches: a what a layer has read, g the
// gradient at its output. With few rows they are much less than the gradient itself, and its direction is cheaper to
// make of them (row_gradient.h). This object brings them together, step by step.
//
// The path of the data. keep() copies a call's rows into this rank's place of a message; several small layers share
// one. A message whose layers have had as many rows as is usual here leaves at once, inside the backward pass, which is
// before most gradients do. leave() sends the rest, from step(). Whoever makes directions waits for a message that has
// left, and reads the rows of all ranks in it; next() ends the step. Between ranks that share memory all goes in
// leave(), and with one rank nothing goes anywhere.
//
// What travels is as short as it can be: rows that are there, without their zeros where that is less (zero_packing.h),
// packed as a message leaves and unpacked by whoever waits for it.
//
// Who decides what. Which layers, and how many rows each rank has a place for, is the same on all ranks. Every rank
// sends every message once a step, whatever has happened in it: that a layer had more rows than places, or none, stands
// in the message. What comes too late to be in it makes the rows those of another gradient; nobody may use them without
// having compared.
//
// Threads: the owner's calls under a lock of its own. Another thread may have one message that has left, until next().
// No call blocks but Message::wait(), next() and, between ranks that share memory, leave().
// Errors: c10::DistBackendError from wait() and next() where a rank is in another step; those of the group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "kfac/comm/kfac_exchange.h"

namespace torchext {

class PerSampleExchange {
 public:
  struct Layer {
    int number = -1;  // the engine's
    std::int64_t inputs = 0;
    std::int64_t outputs = 0;
    std::int64_t places = 0;  // for rows of every rank
  };
  // [rows, inputs] and [rows, outputs]: those of rank 0 first. Undefined: not all of them are known, or there are none.
  struct Rows {
    at::Tensor inputs;
    at::Tensor gradients;
  };
  class Message {
   public:
    // Of the layers whose rows it has.
    const std::vector<int>& layers() const { return numbers_; }
    // Until those of all ranks are here. Twice is harmless.
    void wait();
    Rows rows(int layer) const;

   private:
    friend class PerSampleExchange;
    struct Place {
      std::int64_t count = 0;    // where in a rank's part: the number of rows,
      std::int64_t inputs = 0;   // a [places, inputs],
      std::int64_t outputs = 0;  // g [places, outputs]
      std::int64_t kept = 0;     // rows in this step
      std::int64_t usual = 0;    // in any
      Layer layer;
    };
    std::size_t placeOf(int layer) const;  // in places_
    at::Tensor rowsOf(int rank, const Place& place, bool inputs) const;
    void restart();
    std::int64_t pack(int rank);
    void unpack(int rank);
    template <class T>
    std::int64_t packAs(int rank);
    template <class T>
    void unpackAs(int rank);

    std::vector<int> numbers_;
    std::vector<Place> places_;
    at::Tensor all_;     // [ranks, elements], each: the step, counts, rows
    at::Tensor packed_;  // [ranks, elements], each: the step, counts, for each block of rows whether it has its zeros
                         // still, blocks. Undefined where nothing travels
    int rank_ = 0;       // this one
    std::int64_t step_ = 0;
    std::size_t missing_ = 0;  // layers that have not had their usual rows
    bool left_ = false;
    bool come_ = false;
    std::vector<KfacExchange::Work> coming_;
    std::vector<KfacExchange::Work> going_;
  };
  // Called for each message when it has left.
  using Left = std::function<void(const std::shared_ptr<Message>&)>;

  // layers: in the order in which the backward pass comes to them. exchange: null for one rank; outlives this.
  // tag: of the first message; there are no more than layers.
  PerSampleExchange(std::vector<Layer> layers, const at::TensorOptions& options, KfacExchange* exchange, int tag,
                    Left left);

  const std::vector<Layer>& layers() const { return layers_; }
  const at::TensorOptions& options() const { return options_; }
  bool has(int layer) const { return find(layer) != nullptr; }
  // Whether rows come while the owner does something else.
  bool travels() const { return exchange_ != nullptr && !exchange_->sharesMemory(); }
  // How many rows this rank has of a layer in a step, as a rule. Before a step begins.
  void expect(int layer, std::int64_t rows);
  void keep(int layer, const at::Tensor& input, const at::Tensor& gradient);
  // Drops what was kept and has not left.
  void forget();
  void leave();
  void next();
  std::size_t bytes() const;

 private:
  Message* find(int layer) const;
  void receive();
  void send(std::size_t number);

  std::vector<Layer> layers_;
  at::TensorOptions options_;
  std::vector<std::shared_ptr<Message>> messages_;
  KfacExchange* exchange_;
  int tag_;
  Left when_left_;
  int rank_ = 0;
  int ranks_ = 1;
  std::int64_t step_ = 0;  // of this object
  bool receiving_ = false;
};

}  // namespace torchext
