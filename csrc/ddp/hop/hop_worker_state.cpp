#include "ddp/hop/hop_worker_state.h"

#include <utility>

namespace torchext {

using core::HopMessage;

HopWorkerState::HopWorkerState(c10::intrusive_ptr<AttachableBackend> backend, HopSetup options)
    : group(std::move(backend)),
      setup(std::move(options)),
      rank(group->getRank()),
      slots(setup.graph, setup.mode, rank, setup.model_bytes) {
  stats.slot_bytes = static_cast<std::int64_t>(slots.bytes());
}

void HopWorkerState::fail(const std::exception_ptr& reason) {
  if (!error) {
    error = reason;
  }
  changed.notify_all();
  slots_free.notify_all();
  for (auto& [peer, waiting] : to_send) {
    waiting.notify_all();
  }
}

HopMessage HopWorkerState::header(HopMessage::Kind kind, std::int64_t tag) const {
  HopMessage message;
  message.kind = kind;
  message.sender = rank;
  message.session = session;
  message.tag = tag;
  message.bytes = kind == HopMessage::kModel ? setup.model_bytes : 0;
  message.digest = setup.digest;
  return message;
}

}  // namespace torchext
