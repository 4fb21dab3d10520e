// RowWaits has a thread on which the messages of a RowExchange are waited for, so that whoever needs them can look at
// signals meanwhile: a message of Gloo's cannot be asked whether it has come. So it is needed, whatever it costs:
// without it a signal's handler runs only when the message is there, or when the group's timeout has passed.
//
// A wait that a signal's handler ends goes on here, and the next one waits for the same. A failure of the group ends it
// everywhere, for it is a wait of the group's. Where nothing travels there is no thread, and nothing blocks.
//
// Threads: begin() and busy() under the owner's lock. The destructor waits for what is under way.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <optional>

#include "c10d/threads/task_thread.h"
#include "c10d/transport/row_exchange.h"

namespace torchext {

class RowWaits {
 public:
  explicit RowWaits(std::unique_ptr<RowExchange> rows);
  RowWaits(const RowWaits&) = delete;
  RowWaits& operator=(const RowWaits&) = delete;

  RowExchange& rows() { return *rows_; }
  // Runs what blocks after all that has begun before. Its error is the future's.
  std::shared_future<void> begin(std::function<void()> blocking);
  // Something is waited for, or messages are on their way that nobody waits for yet. Such an object is to outlive the
  // connections: messages that are dropped would stop all that comes after them.
  bool busy() const;

 private:
  const std::unique_ptr<RowExchange> rows_;
  std::shared_future<void> last_;
  std::optional<TaskThread> thread_;  // last: it ends first
};

}  // namespace torchext
