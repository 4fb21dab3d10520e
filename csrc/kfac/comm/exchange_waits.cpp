#include "kfac/comm/exchange_waits.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "c10d/backend/torch_compat.h"
#include "c10d/fault/connection_error.h"
#include "c10d/fault/explain_error.h"
#include "c10d/threads/interruptible_wait.h"

namespace torchext {
namespace {

constexpr const char* kWhat = "K-FAC's exchange";
// Nobody sends with it, and no tag of K-FAC's is as high.
constexpr int kClosingTag = 0x7fffffff;
// Ticks without a wait after which the thread sleeps until the next one.
constexpr int kRestlessTicks = 20;

}  // namespace

// The messages that are waited for now, and what the thread does with them.
struct ExchangeWaits::Waiting {
  void tick() {
    std::unique_lock lock(mutex);
    for (int idle = 0; !closed; ++idle) {
      if (idle > kRestlessTicks) {
        asleep = true;
        changed.wait(lock, [this] { return closed || !works.empty(); });
        asleep = false;
      }
      changed.wait_for(lock, kTick, [this] { return closed; });
      for (c10d::Work* work : works) {
        work->abort();
        idle = 0;
      }
    }
  }
  void add(c10d::Work& work) {
    const std::lock_guard lock(mutex);
    works.push_back(&work);
    if (asleep) {
      changed.notify_all();
    }
  }
  void remove(c10d::Work& work) {
    const std::lock_guard lock(mutex);
    works.erase(std::find(works.begin(), works.end(), &work));
  }

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::vector<c10d::Work*> works;
  bool asleep = false;
  bool closed = false;
};

class ExchangeWaits::WatchedWork final : public CompatWork {
 public:
  WatchedWork(std::shared_ptr<ExchangeWaits> waits, ExchangeWaits::Work inner, int peer)
      : waits_(std::move(waits)), inner_(std::move(inner)), peer_(peer) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    waits_->wait(*inner_, peer_);
    return true;
  }

 protected:
  std::chrono::milliseconds workTimeout() const override { return waits_->timeout(); }

 private:
  const std::shared_ptr<ExchangeWaits> waits_;
  const ExchangeWaits::Work inner_;
  const int peer_;
};

ExchangeWaits::ExchangeWaits(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<GroupHealth> model)
    : backend_(std::move(backend)),
      model_(std::move(model)),
      creator_(getpid()),
      waiting_(std::make_shared<Waiting>()),
      thread_("tx_kfac_waits", [waiting = waiting_] { waiting->tick(); }) {}

ExchangeWaits::~ExchangeWaits() {
  if (getpid() != creator_) {
    // Neither the thread nor, for certain, its lock is there.
    thread_.abandon();
    static_cast<void>(new (std::nothrow) std::shared_ptr<Waiting>(waiting_));
    return;
  }
  {
    const std::lock_guard lock(waiting_->mutex);
    waiting_->closed = true;
    waiting_->changed.notify_all();
  }
  thread_.finish(2 * kTick);
}

ExchangeWaits::Work ExchangeWaits::start(at::Device device, int peer, const std::function<Work()>& call) {
  checkUsable();
  Work inner;
  try {
    inner = call();
  } catch (const std::exception&) {
    fail(peer);
  }
  if (!inner || !device.is_cpu()) {
    return inner;
  }
  return c10::make_intrusive<WatchedWork>(shared_from_this(), std::move(inner), peer);
}

void ExchangeWaits::checkUsable() const {
  if (model_) {
    model_->checkUsable(kWhat);
  }
  if (cut_) {
    C10_THROW_ERROR(DistBackendError,
                    "torchext.optim: an earlier exchange was interrupted, so that ranks no longer know what the others "
                    "have sent; start the job again");
  }
}

void ExchangeWaits::look() {
  try {
    checkSignals();
  } catch (...) {
    if (model_ && model_->usable()) {
      const int rank = backend_->getRank();
      model_->poison(rank, c10::str("rank ", rank, " was interrupted in ", kWhat), GroupHealth::kRemoteGrace);
    }
    cut();
    throw;
  }
  if (model_ && !model_->usable()) {
    cut();
    model_->checkUsable(kWhat);
  }
}

void ExchangeWaits::wait(c10d::Work& work, int peer) {
  try {
    if (peer >= 0) {
      waitForMessage(work);
    } else {
      waitForCollective(work);
    }
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception& error) {
    if (!isConnectionError(error)) {
      throw;  // a handler's, among others
    }
    fail(peer);
  }
}

void ExchangeWaits::waitForMessage(c10d::Work& work) {
  const auto end = std::chrono::steady_clock::now() + timeout();
  for (bool come = false; !come;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    waiting_->add(work);
    try {
      come = work.wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (...) {
      waiting_->remove(work);
      throw;
    }
    waiting_->remove(work);
    if (!come) {
      look();
    }
  }
}

void ExchangeWaits::waitForCollective(c10d::Work& work) {
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  if (!work.isCompleted()) {
    const auto state = std::make_shared<Done>();
    work.getFuture()->addCallback([state](c10::ivalue::Future& /*future*/) {
      const std::lock_guard lock(state->mutex);
      state->done = true;
      state->changed.notify_all();
    });
    std::unique_lock lock(state->mutex);
    while (!state->changed.wait_for(lock, kTick, [&] { return state->done; })) {
      lock.unlock();
      look();
      lock.lock();
    }
  }
  work.wait();
}

// With the error that is being handled.
void ExchangeWaits::fail(int peer) {
  const auto error = std::current_exception();
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& what) {
    if (!isConnectionError(what)) {
      throw;
    }
    text = shortened(what.what());
  }
  cut();
  if (model_) {
    std::rethrow_exception(explain(*model_, error, {.name = kWhat, .peer = peer}));
  }
  C10_THROW_ERROR(DistBackendError,
                  c10::str("torchext.optim: ", kWhat, peer >= 0 ? c10::str(" with rank ", peer) : "", " failed: ", text,
                           "; has that rank died, been interrupted, or taken fewer steps? Start the job again"));
}

// As InnerGroups::closeConnections(): the timeout of a wait closes all connections of its group.
void ExchangeWaits::cut() noexcept {
  if (cut_.exchange(true)) {
    return;
  }
  for (int peer = 0; peer < backend_->getSize(); ++peer) {
    if (peer == backend_->getRank()) {
      continue;
    }
    try {
      std::vector<at::Tensor> tensors{at::empty({1}, at::kByte)};
      backend_->recv(tensors, peer, kClosingTag)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception& error) {
      if (contains(error.what(), "Timed out")) {
        return;
      }
    }
  }
}

}  // namespace torchext
