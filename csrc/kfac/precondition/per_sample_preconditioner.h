// PerSamplePreconditioner: directions of Linear layers that are made of the rows of all ranks' batches, while the
// gradients themselves are on their way.
//
// The path of the data. rows() takes the rows of a call, and they travel (row_exchange.h). A thread makes directions of
// them (per_sample_product.h) from begin() on. The backward pass then has nothing left to compute, and waits for DDP.
// The thread begins once the rows of all layers are here, for then that is so on all ranks: before, it would take a
// processor's time from what others wait for. made() is asked for them in step(), when the gradients are there to be
// compared with. Where no rows travel, between ranks that share memory and in one process, there is no thread: made()
// makes them.
//
// Directions ahead. What is left to step() is to multiply both halves of a direction, times what the gradients have
// been multiplied with and the KL clip. With rows of all layers the clip is known as soon as all rows are here, if the
// rest is as in the step before. Where that is foreseen, the thread writes whole directions into memory of its own, and
// step(), if it comes to the same factor, only has them change places with the gradients.
//
// Threads: the owner's calls under a lock of its own; one thread that owns all it uses, without the interpreter lock.
// Between rows().keep() and next() nobody else uses what prepare() was given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/transport/row_exchange.h"
#include "kfac/base/background_worker.h"
#include "kfac/comm/communicator.h"
#include "kfac/linalg/factor_inverse.h"
#include "kfac/precondition/per_sample_product.h"
#include "kfac/precondition/tiled_product.h"

namespace torchext {

class PerSamplePreconditioner {
 public:
  // As RowExchange. comm: null for one rank; outlives this.
  PerSamplePreconditioner(std::vector<RowExchange::Matrix> layers, const at::TensorOptions& options, Communicator* comm,
                          int tag);

  // Takes rows, and says of which layers; leave() and next() of it are this object's.
  RowExchange& rows() { return rows_; }
  const RowExchange& rows() const { return rows_; }
  // What directions are made with from the next step on.
  struct Inverses {
    FactorInverse of_inputs;  // undefined: never made, and so no direction is
    FactorInverse of_outputs;
    bool bias = false;                    // whether the layer has one that is trained
    std::shared_ptr<TiledProduct> tiled;  // null: by BLAS
  };
  void prepare(int layer, Inverses inverses) { inverses_[layer] = std::move(inverses); }
  // Has directions made, if all rows have left. Never blocks.
  void begin();
  // Sends what has not left yet, and begins. Every rank does so once a step.
  void leave() {
    rows_.leave();
    begin();
  }
  // After leave(). Waits.
  PerSampleProduct made(int layer);
  // What step() is likely to multiply directions of rows with, by the engine's layers, all of which have rows. From the
  // next step on, and until it is told otherwise; nullopt: nobody knows.
  struct Scaling {
    std::vector<double> rates;
    std::vector<double> factors;
    std::optional<double> kl_clip;
  };
  void foresee(std::optional<Scaling> scaling) { foreseen_ = std::move(scaling); }
  // After made(). Waits. Undefined where it is not written ahead.
  WrittenGradient written(int layer);
  // Ends a step in which leave() was called. Waits.
  void next();
  // Of the rows, of what directions are made of, which is no larger, and of directions ahead.
  std::size_t bytes() const;

 private:
  // What the thread makes, by a key for each.
  struct Result {
    PerSampleProduct made;
    WrittenGradient written;
  };
  static std::size_t keyOfMade(int layer) { return 2 * static_cast<std::size_t>(layer); }
  static std::size_t keyOfWritten(int layer) { return keyOfMade(layer) + 1; }
  static int layerOf(std::size_t key) { return static_cast<int>(key / 2); }
  // Of a layer, what the thread makes directions of, and where it writes one ahead.
  struct Source {
    std::shared_ptr<RowExchange::Message> message;
    Inverses inverses;
    WrittenGradient to;
  };
  // Of a step whose scaling is foreseen. The thread's.
  struct Ahead {
    Scaling scaling;
    std::vector<PerSampleProduct> made;  // [layer]
    std::optional<double> clip;
  };
  static PerSampleProduct make(int layer, const RowExchange::Message& message, const Inverses& inverses,
                               TiledProduct::Work& work);
  static WrittenGradient write(int layer, Ahead& ahead, const WrittenGradient& to, bool tiles,
                               TiledProduct::Work& work);
  const WrittenGradient& placeFor(const RowExchange::Matrix& layer);

  std::map<int, Inverses> inverses_;
  std::optional<Scaling> foreseen_;
  std::map<int, WrittenGradient> written_;                     // where directions ahead are written
  std::shared_ptr<Ahead> ahead_;                               // null: not in this step
  std::map<int, std::shared_ptr<RowExchange::Message>> left_;  // in this step
  bool following_ = false;                                     // the thread has this step's
  bool ending_ = false;  // next() has begun: if it was interrupted, the thread has nothing of this step any more
  std::shared_ptr<TiledProduct::Work> work_ = std::make_shared<TiledProduct::Work>();
  std::optional<BackgroundWorker<Result>> thread_;
  RowExchange rows_;
};

}  // namespace torchext
