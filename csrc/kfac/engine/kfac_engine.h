// K-FAC: the engine behind torchext.optim, for one process or a group of ranks.
//
// The path of the data. A module's forward hook calls forward(layer, input, outputs), which only puts a C++ hook on the
// node of the graph that multiplies the weight (weight_use.h). When the backward pass has called that node with a
// gradient, both factors' sums are made right there (FactorAccumulator), without Python, copies of inputs or
// synchronisation. Whatever hooks have changed, the node has then been given what the weight's gradient is made of. A
// forward pass that is never differentiated leaves no trace, and a checkpointed one is seen once. step() is called
// after the backward pass, when .grad holds the gradient that all ranks share (DDP has averaged it). It takes the sums
// into the running averages, every `inverse_update_steps` brings the ranks' averages together, inverts, distributes the
// inverses, and then replaces every gradient by its direction V, scaled by the KL clip. The parameters themselves are
// stepped by the caller.
//
// When the sums are made. With a group, and in steps that send no factors, the hook only keeps its two tensors (up to
// 16 MiB; what is beyond is summed at once), and the sums are made when the backward pass has ended: DDP's all-reduces
// are on their way then, and waited for afterwards. Those of Linear layers are made for several steps together
// (deferred_gram.h).
//
// When communication starts. Factors travel only in steps that make inverses (see FactorAccumulator). In such a step a
// factor that has had as many calls as in the steps before is packed by the backward hook, and a bucket of factors
// (core/kfac/kfac_plan.h) leaves as soon as its last one is packed, while the backward pass goes on; buckets leave in
// the order of the plan on every rank, the rest of them in step(). They are waited for and inverted on a thread of
// their own (background_inverses.h), mostly while the backward pass waits for DDP's last all-reduces; what it has made
// is used only once all ranks are known to take the step. A layer that is called once more when its factors have left
// makes its rank ask for all to be sent again. In step() an inverse leaves as soon as it is there, point to point, and
// a layer whose inverses are there gets its direction while later ones travel. Only d-kfac, the plain algorithm, waits
// for all each time, and has no such thread. Directions leave layer by layer as they are made (small ones together),
// and are waited for at the end. Ranks that share a host's memory send nothing early: there all factors are summed in
// one pass of step(), which takes less time than the threads of sockets would from the backward pass, and inverses go
// together once all are made.
//
// A step that is left out. Gradients may be cleared without step(), on all ranks alike. In a step that sends, that is
// collective, and each rank says there whether it takes the step: if they differ, all throw, and as nothing is merged
// or counted before that, they go on as if the step had never been.
//
// Directions of rows, where the measured costs say so: in steps that make no inverses, the ranks gather the rows of
// which Linear layers' gradients are made, and make directions of those (per_sample_preconditioner.h,
// kfac_engine_rows.cpp). A layer whose gradient in .grad is not that of its rows gets its direction the usual way, on
// every rank by itself.
//
// On an accelerator nothing waits for the device but one question a step (are all gradients finite?), in updates of the
// inverses another or two (did all succeed? were those of other ranks ever made?), and stats(). All is queued on the
// streams where the hooks and step() run: sums at once in the hook, not deferred; inverses of equal size in one call
// (factor_batch.h); messages in one group a time, hence after all inversions. What the host decides by travels between
// CPUs.
//
// Who owns what. Every rank owns the running averages of its own batches. The mean over ranks exists only in a step's
// buffer. Inverses belong to the ranks that precondition with them.
//
// Not a number. If a gradient is not finite, step() returns false on every rank (the gradients are shared), forgets
// the step's sums, and the caller must not step. Sums that overflow on one rank while gradients are finite are left out
// there. Both are counted.
//
// Threads: hooks run in autograd's thread, everything else where the caller is; one lock. That of background inverses
// reads factors that have left, and never takes the lock. No call needs the GIL, and
// none may be made with it: a wait that holds the lock takes it to run signal handlers.
// Errors: std::invalid_argument for an option; c10::ValueError for layers on several devices; c10::DistBackendError if
// ranks disagree, at construction; errors of the group as they come.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include "core/kfac/kfac_plan.h"
#include "kfac/base/kfac_options.h"
#include "kfac/comm/kfac_exchange.h"
#include "kfac/factors/factor_accumulator.h"
#include "kfac/factors/ready_clock.h"
#include "kfac/inverses/background_inverses.h"
#include "kfac/inverses/factor_inverter.h"
#include "kfac/inverses/inverse_exchange.h"
#include "kfac/precondition/gradient_exchange.h"
#include "kfac/precondition/per_sample_preconditioner.h"
#include "kfac/precondition/preconditioner.h"

namespace torchext {

struct KfacStats {
  std::int64_t steps = 0;
  std::int64_t skipped = 0;  // not finite, on all ranks
  std::int64_t factor_updates = 0;
  std::int64_t inverse_updates = 0;
  std::int64_t factors_left_out = 0;  // not finite on this rank alone
  std::int64_t runs_overlapped = 0;   // left before step()
  std::int64_t runs = 0;
  std::int64_t row_directions = 0;          // of layers, made of the rows of all ranks
  std::int64_t row_directions_refused = 0;  // gradients that were not those of their rows
  std::int64_t row_directions_ahead = 0;    // those that were written, too, before step()
  double clip = 1;                          // nu of the last step
  InverseFailures failures;
  ExchangeBytes bytes;
  std::int64_t memory_bytes = 0;
  // Seconds of the host, summed; on an accelerator it only queues the work.
  double factor_seconds = 0;
  double exchange_wait_seconds = 0;
  double invert_seconds = 0;
  double distribute_seconds = 0;
  double precondition_seconds = 0;
};

// A factor in a checkpoint: the mean over ranks, and the inverse in use. Empty tensors: none.
struct FactorState {
  at::Tensor factor;  // packed triangles
  at::Tensor matrix;
  at::Tensor values;
};

class KfacEngine : public std::enable_shared_from_this<KfacEngine> {
 public:
  // Collective if there is a group (null: a single process): checks that all ranks agree, and measures costs. model: of
  // the group in which the model trains, whose failure ends every wait; null where that is none of torchext's.
  KfacEngine(std::vector<KfacLayerSpec> layers, KfacOptions options,
             const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<GroupHealth> model);

  // A call of the layer's module: its input, and what it returned, whatever other hooks have made of that. False: no
  // gradient of what it returned reaches the weight. Throws std::invalid_argument for a call that is not such a
  // layer's.
  bool forward(int layer, const at::Tensor& input, const std::vector<at::Tensor>& outputs);
  // rates: of each layer, for the clip. others: gradients of parameters outside the layers, checked too and scaled.
  // loss_scale: what the loss was multiplied with; gradient_scale: multiplies the gradients first (1 / loss_scale if
  // nobody has done so). found_inf: the caller knows already. Collective. False: skip this step.
  bool step(const std::vector<double>& rates, const std::vector<at::Tensor>& others, double loss_scale,
            double gradient_scale, bool found_inf);
  // How many layers have directions of rows now, in steps that make no inverses.
  std::size_t rowLayers() const;
  // Forgets what a backward pass left that no step() used. Collective in a step that sends factors.
  void discard();

  const KfacOptions& options() const { return options_; }
  void setDamping(double damping);
  void setKlClip(std::optional<double> kl_clip);

  const std::vector<KfacLayerSpec>& layers() const { return layers_; }
  const std::vector<FactorLayout>& layouts() const { return accumulator_->layouts(); }
  const core::KfacPlan& plan() const { return plan_; }
  const core::KfacCosts& costs() const { return input_.costs; }
  // Whether directions of larger layers are made on the processor's matrix tiles; alike on all ranks.
  bool usesTiles() const { return tiles_; }
  core::KfacPrediction prediction() const { return core::predictKfac(plan_, input_); }
  KfacStats stats() const;

  // Collective. One entry a factor. load() takes what any world size saved; the caller has compared names and sizes.
  std::vector<FactorState> state();
  void load(const std::vector<FactorState>& state, std::int64_t steps, std::int64_t factor_updates);

 private:
  // A wait runs Python's signal handlers on the thread that holds the lock; one may read stats() or set an option
  // there.
  using Lock = std::lock_guard<std::recursive_mutex>;
  // The lock of what a handler must not call there: it throws c10::Error then.
  class ReentrancyGuard {
   public:
    ReentrancyGuard(KfacEngine& engine, const char* call);
    ~ReentrancyGuard() { engine_.inside_ = nullptr; }
    ReentrancyGuard(const ReentrancyGuard&) = delete;
    ReentrancyGuard& operator=(const ReentrancyGuard&) = delete;

   private:
    KfacEngine& engine_;
    Lock lock_;
  };

  void makePlan();
  void measureCosts();
  bool allHaveTiles() const;
  double secondsOfProduct(bool tiles);
  double typicalSeconds(double seconds);
  void backward(int layer, const at::Tensor& input, const at::Tensor& gradient, int pass);
  bool defer(int layer, const at::Tensor& input, const at::Tensor& gradient, int backward_pass);
  void callAtEndOfPass();
  void addDeferred();
  void forgetDeferred();
  bool putsProductsOff() const;
  double currentDecay() const;
  // In this step; the same on all ranks, who count steps together.
  bool updatesInverses() const { return stats_.steps % options_.inverse_update_steps == 0; }
  bool exchanging() const;
  bool throughMemory() const { return exchange_ && exchange_->sharesMemory(); }
  bool overlaps() const;
  bool invertsInBackground() const { return exchange_ && !device_path_ && overlaps(); }
  std::vector<std::size_t> invertedAfter(std::size_t end);
  bool madeInBackground() const;
  void waitForBucket(std::size_t bucket);
  bool invertsHere(std::size_t factor_index) const;
  bool worksOn(int layer) const;
  void prepare(std::size_t factor_index, double loss_scale);
  void startBuckets(bool overlapped);
  at::Tensor sharesOf(std::size_t first_factor, std::int64_t elements) const;
  void startRest(double loss_scale);
  void sendFactors(double loss_scale);
  bool agreeOnStep(bool takes_step);
  void sumThroughMemory();
  void waitForBuckets();
  void endBuckets();
  void forgetStep();
  void drop(bool sent);
  void mergeStep(double loss_scale);
  void replanBuckets();
  void updateInverses();
  void invertBuckets();
  void invertLayer(std::size_t first_factor);
  void invert(std::size_t factor_index, const at::Tensor& damping);
  void invertOnDevice();
  std::array<at::Tensor, 2> dampingOfLayer(std::size_t first_factor);
  bool tracesTravel() const;
  at::Tensor tracesOf(std::size_t factor_index) const;
  void takeInverses(std::size_t end);
  void finishInverses();
  void startDirections();
  void makeDirection(int layer);
  void finishDirections();
  bool onFirstStream();
  at::Tensor ofAllRanks(const at::Tensor& own, int tag);
  bool suitsRows(int layer) const;
  bool mayTakeRows(int layer) const;
  bool takesRows(int layer) const;
  bool rowsReplaceShares() const;
  double secondsWithoutRows(std::size_t layer) const;
  void keepRows(int layer, const at::Tensor& input, const at::Tensor& gradient);
  bool takeRows(int layer);
  void takeWritten();
  void foreseeRows(const std::vector<double>& rates);
  std::vector<bool> ofRows() const;
  void prepareRows();
  void forgetRows();
  void endRows();
  at::Tensor ownRowCounts() const;
  void planRows(const at::Tensor& counts);
  std::vector<PerSampleExchange::Layer> chooseRowLayers(const at::Tensor& counts) const;
  core::AlphaBeta costOfRows() const;
  void endPass();

  std::vector<KfacLayerSpec> layers_;
  KfacOptions options_;
  at::Device device_;
  bool device_path_;                        // all work is queued: an accelerator's path
  std::unique_ptr<KfacExchange> exchange_;  // null: one rank
  int rank_ = 0;
  int ranks_ = 1;
  std::shared_ptr<FactorAccumulator> accumulator_;
  FactorInverter inverter_;
  bool tiles_ = false;
  core::KfacPlanInput input_;
  core::KfacPlan plan_;
  std::unique_ptr<Preconditioner> preconditioner_;
  std::unique_ptr<PerSamplePreconditioner> rows_;  // null: of no layer
  bool rows_void_ = false;                         // their directions in this step are made with other inverses
  static constexpr std::int64_t kNoRows = -1;
  struct RowCount {
    std::int64_t seen = 0;  // rows of this rank, in a step that makes inverses
    std::int64_t tried = 0;
    std::int64_t refused = 0;
  };
  std::vector<RowCount> row_counts_;  // [layer]
  // Of directions of rows in this step, 0 for other ones: the factor, and <V, dW>.
  std::vector<double> row_factors_;
  std::vector<double> row_products_;
  // Of the last step in which all directions were of rows.
  std::optional<PerSamplePreconditioner::Scaling> row_scaling_;
  at::Tensor all_row_counts_;  // [ranks, layers], as of the last step that sent factors
  std::unique_ptr<GradientExchange> gradient_exchange_;
  std::vector<bool> made_;               // [layer] its direction, in this step, here
  std::vector<FactorInverse> inverses_;  // [factor]

  at::Tensor payload_;                     // what is summed over ranks, laid out as the running averages
  std::vector<bool> prepared_;             // [factor] packed for this step's exchange
  std::size_t started_ = 0;                // buckets that have left
  std::vector<KfacExchange::Sum> sums_;    // [bucket] none where background_inverses_ has them
  std::size_t followed_ = 0;               // factors whose inversion has been asked for
  double followed_damping_ = 0;            // with which they are inverted
  at::Tensor shares_;                      // of other ranks, in factors that this one adds up
  std::vector<std::int64_t> share_place_;  // [factor] in those of one rank, -1: added up elsewhere or by the group
  at::Tensor traces_;                      // of all factors, summed over ranks, where tracesTravel()
  KfacExchange::Sum traces_sum_;
  std::unique_ptr<InverseExchange> inverse_exchange_;
  std::size_t taken_ = 0;  // factors whose inverses are here, in this update

  struct Calls {
    int expected = -1;
    bool stable = false;
  };
  std::vector<Calls> calls_;  // [layer]
  struct Deferred {
    int layer = 0;
    at::Tensor input;
    at::Tensor gradient;
    int backward_pass = 0;
  };
  std::vector<Deferred> deferred_;
  std::size_t deferred_bytes_ = 0;
  int calling_pass_ = -1;              // the backward pass whose end is waited for
  ReadyClock ready_;                   // by factor, in steps that send factors
  int profiled_ = 0;                   // such steps
  std::optional<c10::Stream> stream_;  // of the first hook of a step, on an accelerator
  bool several_streams_ = false;       // later ones of the step ran on others, too
  bool scaled_loss_ = false;
  bool seen_backward_ = false;  // since the last step; the same on all ranks, even where a batch is empty
  bool stale_ = false;          // a factor was packed before all of its step was known
  KfacStats stats_;
  mutable std::recursive_mutex mutex_;
  const char* inside_ = nullptr;                             // the call whose turn it is
  std::unique_ptr<BackgroundInverses> background_inverses_;  // made when first needed
};

}  // namespace torchext
