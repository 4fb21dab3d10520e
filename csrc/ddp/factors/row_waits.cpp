#include "ddp/factors/row_waits.h"

#include <chrono>
#include <utility>

namespace torchext {

RowWaits::RowWaits(std::unique_ptr<RowExchange> rows) : rows_(std::move(rows)) {
  if (rows_->travels()) {
    thread_.emplace("tx_rows");
  }
}

std::shared_future<void> RowWaits::begin(std::function<void()> blocking) {
  const auto task = std::make_shared<std::packaged_task<void()>>(std::move(blocking));
  last_ = task->get_future().share();
  if (thread_) {
    thread_->post([task] { (*task)(); });
  } else {
    (*task)();
  }
  return last_;
}

bool RowWaits::busy() const {
  const bool waits = last_.valid() && last_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  return waits || rows_->underWay();
}

}  // namespace torchext
