#include "c10d/threads/interruptible_task.h"

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <utility>

#include "c10d/threads/bounded_thread.h"
#include "c10d/threads/interruptible_wait.h"

namespace torchext {

void runInterruptibly(const std::string& name, std::function<void()> body, const std::function<void()>& cancel) {
  constexpr std::chrono::seconds kGrace{2};
  const auto over = std::make_shared<std::promise<void>>();
  const std::shared_future<void> result = over->get_future().share();
  BoundedThread thread(name, [over, body = std::move(body)] {
    try {
      body();
      over->set_value();
    } catch (...) {
      over->set_exception(std::current_exception());
    }
  });
  try {
    waitInterruptibly(result);
  } catch (...) {  // a handler's
    cancel();
    thread.finish(kGrace);
    throw;
  }
  thread.finish(kGrace);
  result.get();
}

}  // namespace torchext
