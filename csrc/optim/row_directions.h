// RowDirections: directions of Linear layers that are made of the rows of all ranks' batches, while the gradients
// themselves are on their way.
//
// The path of the data. keep() takes the rows of a call; they travel (batch_rows.h), and as soon as a message is here a
// thread makes the directions of its layers (row_direction.h), mostly while the backward pass waits for DDP. made() is
// asked for them in step(), when the gradients are there to be compared with. Where no rows travel, between ranks that
// share memory and in one process, there is no thread: made() makes them.
//
// Threads: the owner's calls under a lock of its own; one thread that owns all it uses, without the interpreter lock.
// Between keep() and next() nobody else uses what prepare() was given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "optim/batch_rows.h"
#include "optim/factor_inverse.h"
#include "optim/following_thread.h"
#include "optim/row_direction.h"
#include "optim/tiled_direction.h"

namespace torchext {

class RowDirections {
 public:
  // As BatchRows.
  RowDirections(std::vector<BatchRows::Layer> layers, const at::TensorOptions& options, KfacExchange* exchange,
                int tag);

  const std::vector<BatchRows::Layer>& layers() const { return rows_.layers(); }
  bool has(int layer) const { return rows_.has(layer); }
  bool travels() const { return rows_.travels(); }
  // What directions are made with from the next step on.
  struct Inverses {
    FactorInverse of_inputs;  // undefined: never made, and so no direction is
    FactorInverse of_outputs;
    bool bias = false;                      // whether the layer has one that is trained
    std::shared_ptr<TiledDirection> tiled;  // null: by BLAS
  };
  void prepare(int layer, Inverses inverses) { inverses_[layer] = std::move(inverses); }
  void expect(int layer, std::int64_t rows) { rows_.expect(layer, rows); }
  void keep(int layer, const at::Tensor& input, const at::Tensor& gradient) { rows_.keep(layer, input, gradient); }
  // Drops what was kept and has not left.
  void forget() { rows_.forget(); }
  // Sends what has not left yet. Every rank does so once a step.
  void leave() { rows_.leave(); }
  // After leave(). Waits.
  RowDirection made(int layer);
  // Ends a step in which leave() was called. Waits.
  void next();
  // Of the rows, and of what directions are made of, which is as large.
  std::size_t bytes() const { return 2 * rows_.bytes(); }

 private:
  static RowDirection make(int layer, const BatchRows::Message& message, const Inverses& inverses,
                           TiledDirection::Work& work);
  void follow(const std::shared_ptr<BatchRows::Message>& message);

  std::map<int, Inverses> inverses_;
  std::map<int, std::shared_ptr<BatchRows::Message>> left_;  // in this step
  bool ending_ = false;  // next() has begun: if it was interrupted, the thread has nothing of this step any more
  std::shared_ptr<TiledDirection::Work> work_ = std::make_shared<TiledDirection::Work>();
  std::optional<FollowingThread<RowDirection>> thread_;
  BatchRows rows_;
};

}  // namespace torchext
