// ProcessGroupDear: the backend named "dear" (Zhang et al., "DeAR: Accelerating Distributed Deep Learning with
// Fine-Grained All-Reduce Pipelining", ICDCS 2023).
//
// Every collective is ForwardedCollectives': exact, over all ranks. Models are trained through torchext.attach(): their
// gradients are reduce-scattered under the backward pass, and what comes of them is gathered under the next forward
// pass; see csrc/ddp/dear/dear_synchronizer.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <tuple>
#include <variant>

#include "c10d/backend/attachable_backend.h"
#include "c10d/backend/option_list.h"

namespace torchext {

// A number of MiB, or "auto", which is kept as 0.
template <class Number>
struct BucketSize {
  using Given = std::variant<Number, std::string>;
  static Number take(const std::string& name, const Given& given) {
    const auto* number = std::get_if<Number>(&given);
    TORCH_CHECK_VALUE(number ? *number >= 0.001 && *number <= 4096 : std::get<std::string>(given) == "auto", name,
                      R"( must be "auto" or in [0.001, 4096] MiB, got )",
                      number ? c10::str(*number) : c10::str('"', std::get<std::string>(given), '"'));
    return number ? *number : 0;
  }
  static Given give(const Number& number) { return number == 0 ? Given("auto") : Given(number); }
};

class ProcessGroupDear : public AttachableBackend {
 public:
  // Ranges are checked by validate(), before any communication.
  struct Options : GroupOptions {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : GroupOptions("dear", timeout) {}

    static constexpr const char* kName = "DeAROptions";

    std::string form = "replicated";
    double bucket_mb = 0;  // 0: "auto"
    bool allreduce_fallback = true;
    std::string transport = "auto";

    static auto list() {
      return std::tuple{
          option("form", &Options::form,
                 R"("replicated": gradients are gathered, and any optimizer steps whole parameters. "sharded": every )"
                 "worker steps its share, with 1 / world size of the optimizer's state, and parameters are gathered.",
                 oneOf({"sharded", "replicated"})),
          // Ranks compare the size that attach() takes, and whether a group of its own carries the exchanges.
          option<BucketSize>("bucket_mb", &Options::bucket_mb,
                             R"(MiB of a bucket, 0.001 to 4096; "auto": tuned in the first steps.)", OwnChoice{}),
          option("allreduce_fallback", &Options::allreduce_fallback,
                 "Train as plain DDP where that is measured to be faster."),
          option("transport", &Options::transport,
                 R"("auto": a ring of messages on the CPU, NCCL's collectives on CUDA. "hierarchical", on the CPU: a )"
                 "ring inside each room, then one between rooms. Rooms are hosts of several ranks, else racks, which "
                 R"(are measured; of unequal size they make one ring. "collectives": Gloo's on the CPU, too.)",
                 OwnChoice{}, oneOf({"auto", "hierarchical", "collectives"})),
      };
    }

    // Throws c10::ValueError with the option's name, its value and the allowed range.
    void validate() const;
    // NOLINTNEXTLINE(modernize-use-override): the options of torch 2.11 have none to override.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }
  };

  // name: "dear", or "torchext" where torchext.attach() is to choose between plain DDP and dear.
  ProcessGroupDear(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options,
                   const std::string& name = "dear");
  ~ProcessGroupDear() override;

  const Options& dearOptions() const { return *dear_options_; }

 protected:
  c10::intrusive_ptr<c10d::Backend> createChild(int rank, int size, InnerBackends inner,
                                                c10::intrusive_ptr<c10d::Backend::Options> options) override;

 private:
  c10::intrusive_ptr<Options> dear_options_;
};

}  // namespace torchext
