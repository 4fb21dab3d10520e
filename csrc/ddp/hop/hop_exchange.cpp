#include "ddp/hop/hop_exchange.h"

#include <exception>

#include <ATen/record_function.h>

#include "c10d/fault/explain_error.h"
#include "c10d/fault/fault_points.h"
#include "ddp/common/elapsed.h"

namespace torchext {

HopExchange::HopExchange(const c10::intrusive_ptr<AttachableBackend>& group, const HopModel& model,
                         TensorsInPlace& tensors, const HopSetup& setup)
    : group_(group),
      model_(model),
      tensors_(tensors),
      mode_(setup.mode),
      transfer_buffers_(transferBuffersOf(model.parameters(), model.buffers())),
      mailbox_(group, setup) {}

template <class Body>
void HopExchange::orTellAll(Body body) {
  try {
    body();
  } catch (...) {
    std::rethrow_exception(explainToAll(*group_->health(), std::current_exception(), OpInfo{.name = "training"}));
  }
}

void HopExchange::publish(bool send) {
  tensors_.takeBack("hop");
  tensors_.note();
  flight_ = group_->flights().begin("exchange", "all_reduce", transfer_buffers_, transfer_buffers_);
  std::byte* block = mailbox_.ownBlock(tag_);
  orTellAll([&] {
    const auto start = Clock::now();
    model_.pack(block);
    copy_ms_ += millisecondsSince(start);
    mailbox_.publish(tag_, send);
    faultPoint(FaultPoint::kHopPublished);
  });
  own_block_ = block;
}

void HopExchange::average() {
  const auto inputs = mailbox_.take();
  orTellAll([&] {
    faultPoint(FaultPoint::kHopTaken);
    RECORD_FUNCTION("torchext::hop::average", std::vector<c10::IValue>{});
    const auto start = Clock::now();
    model_.assign(inputs, own_block_, tensors_.endRound());
    copy_ms_ += millisecondsSince(start);
    mailbox_.release();
  });
  flight_.done();
  own_block_ = nullptr;
}

std::int64_t HopExchange::advance() {
  const int jump = mode_.skips() ? core::plannedJump(mode_, mailbox_.lag()) : 1;
  if (jump > 1) {
    tag_ += jump - 1;
    skipped_ += jump - 1;
    entering_ = Entering::kJump;
    return jump - 1;
  }
  ++tag_;
  entering_ = Entering::kNext;
  return 0;
}

void HopExchange::enter() {
  if (entering_ == Entering::kJump) {
    RECORD_FUNCTION("torchext::hop::skip", std::vector<c10::IValue>{});
    if (!isPublished()) {
      mailbox_.enter(tag_);
      publish(false);  // all who would receive it have passed
    }
    average();
    ++tag_;
    entering_ = Entering::kNext;
  }
  if (entering_ == Entering::kNext) {
    mailbox_.enter(tag_);
    entering_ = Entering::kNo;
  }
}

bool HopExchange::drain(bool finally, std::optional<std::chrono::milliseconds> limit) {
  if (!mailbox_.drain(finally, limit)) {
    return false;
  }
  flight_.done();  // all have met: nobody averages with what was published last
  tag_ = 0;
  own_block_ = nullptr;
  return true;
}

HopStats HopExchange::stats() const {
  HopStats result = mailbox_.stats();
  result.skipped = skipped_;
  result.copy_ms = copy_ms_;
  return result;
}

}  // namespace torchext
