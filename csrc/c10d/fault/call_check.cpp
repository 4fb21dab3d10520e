#include "c10d/fault/call_check.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <utility>

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include "c10d/fault/call_site.h"
#include "c10d/fault/collective_header.h"
#include "c10d/fault/explain_error.h"
#include "c10d/fault/fault_points.h"
#include "c10d/fault/group_waits.h"
#include "c10d/fault/parse_message.h"
#include "c10d/threads/interruptible_wait.h"

namespace torchext {
namespace {

constexpr int kAgreementTag = FailureMonitor::kReservedTags + 2;
// Calls that may wait at a time, well below what the ledger remembers.
constexpr std::uint64_t kMostWaiting = core::CallLedger::kPast / 2;

// For a rank that knows both calls to say so.
constexpr std::chrono::milliseconds kFaultMessagePatience{1000};

at::Tensor messageBuffer() { return at::zeros({static_cast<std::int64_t>(sizeof(core::CallMessage))}, at::kByte); }

}  // namespace

CallCheck::CallCheck(std::shared_ptr<GroupHealth> health, std::shared_ptr<FailureMonitor> monitor,
                     c10::intrusive_ptr<c10d::Backend> control, Mode mode)
    : health_(std::move(health)),
      monitor_(std::move(monitor)),
      control_(std::move(control)),
      rank_(control_->getRank()),
      size_(control_->getSize()),
      mode_(mode),
      thread_(std::make_unique<TaskThread>("torchext_start")) {
  failure_callback_ = health_->onFailure().add([this] {
    std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  });
}

CallCheck::~CallCheck() { stop(); }

void CallCheck::awaitRoom() {
  std::unique_lock lock(mutex_);
  waitInterruptibly(changed_, lock, [this] { return waiting_ < kMostWaiting || failed_; });
}

std::optional<CallCheck::Ticket> CallCheck::record(core::CallHeader header) {
  if (mode_ == Mode::kLines && !isOrderlyExit(header)) {
    header.line = callSite();
  }
  std::optional<core::CallMessage> different;
  std::optional<Ticket> ticket;
  {
    const std::lock_guard lock(mutex_);
    const bool predicted = ledger_.record(header) && mode_ == Mode::kNew;
    const std::uint64_t number = ledger_.count();
    if (early_ && early_->number == number) {
      if (early_->header != header) {
        different = early_;
      }
      early_.reset();
    }
    if (!predicted || waiting_ > 0) {
      ++waiting_;
      turns_.try_emplace(number);
      ticket = Ticket{number, header, !predicted};
    }
  }
  if (different) {
    differ(different->number, header, different->sender, different->header);
    health_->checkUsable(opName(static_cast<c10d::OpType>(header.kind)));  // throws: nothing of this call has begun
  }
  return ticket;
}

void CallCheck::startLater(const Ticket& ticket, const OpInfo& op,
                           std::function<void(const std::exception_ptr&)> start) {
  std::lock_guard lock(mutex_);
  if (failed_) {
    return;
  }
  turns_[ticket.number] = [self = shared_from_this(), ticket, op, start = std::move(start)] {
    std::exception_ptr error;
    try {
      if (ticket.agree) {
        self->agree(ticket, op);
        faultPoint(FaultPoint::kCallAgreed);
      }
    } catch (const std::exception&) {
      error = explainToAll(*self->health_, std::current_exception(), op);
    }
    start(error);
    std::lock_guard started(self->mutex_);
    --self->waiting_;
    self->changed_.notify_all();
  };
  // Two threads may come here in another order than they have got their numbers, which the ranks compare.
  while (!turns_.empty() && turns_.begin()->second) {
    thread_->post(std::move(turns_.begin()->second));
    turns_.erase(turns_.begin());
  }
}

// Round i tells the rank 2^i ahead, and hears from the one 2^i behind, that the sender and those it has heard of agree.
void CallCheck::agree(const Ticket& ticket, OpInfo op) {
  op.nested = true;
  const core::CallMessage message{.sender = rank_, .number = ticket.number, .header = ticket.header};
  monitor_->post(message);
  faultPoint(FaultPoint::kCallAsked);
  std::vector<at::Tensor> own{messageBuffer()};
  std::memcpy(own[0].mutable_data_ptr(), &message, sizeof(message));
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  try {
    for (int distance = 1; distance < size_; distance *= 2) {
      const int source = (rank_ + size_ - distance) % size_;
      std::vector<at::Tensor> theirs{messageBuffer()};
      works.push_back(control_->recv(theirs, source, kAgreementTag));
      const auto arrival = works.back();
      works.push_back(control_->send(own, (rank_ + distance) % size_, kAgreementTag));
      op.peer = source;
      waitPointToPoint(*health_, arrival, FailureMonitor::kForever, op);
      const auto its = parseOrRefuse(
          [&](const char* error) { return refuse(*health_, op, error); }, &core::parseCallMessage,
          std::span(static_cast<const std::byte*>(theirs[0].const_data_ptr()), sizeof(core::CallMessage)), source);
      if (its.number != ticket.number || its.header != ticket.header) {
        disagree(ticket, its);
        std::rethrow_exception(health_->failureOf(op));
      }
    }
    for (std::size_t sent = 1; sent < works.size(); sent += 2) {
      waitPointToPoint(*health_, works[sent], FailureMonitor::kForever, op);  // Gloo reads `own` until then
    }
  } catch (...) {
    std::for_each(works.begin(), works.end(), [this](const auto& work) { monitor_->keep(work); });
    throw;
  }
}

void CallCheck::disagree(const Ticket& ticket, const core::CallMessage& its) {
  std::unique_lock lock(mutex_);
  if (its.number < ticket.number) {
    // It asks about a call that was predicted here and has started.
    const auto own = ledger_.find(its.number);
    lock.unlock();
    differ(its.number, own.value_or(ticket.header), its.sender, its.header);
    return;
  }
  if (its.number > ticket.number) {
    // It has started its call of this number, which this rank cannot name. Whoever has our header names both.
    changed_.wait_for(lock, kFaultMessagePatience, [this] { return failed_; });
  }
  lock.unlock();
  differ(ticket.number, ticket.header, its.sender, its.header);
}

void CallCheck::received(const core::CallMessage& message) {
  std::optional<core::CallHeader> own;
  {
    std::lock_guard lock(mutex_);
    if (message.number > ledger_.count()) {
      early_ = message;
      return;
    }
    own = ledger_.find(message.number);
  }
  // What is forgotten is older than the calls that may wait, so it has started, and the sender has agreed to it.
  if (own && *own != message.header) {
    differ(message.number, *own, message.sender, message.header);
  }
}

void CallCheck::differ(std::uint64_t number, const core::CallHeader& own, int peer, const core::CallHeader& its) {
  if (isOrderlyExit(own) != isOrderlyExit(its)) {
    const bool gone = isOrderlyExit(own);
    health_->poison(
        gone ? rank_ : peer,
        c10::str("rank ", gone ? rank_ : peer, " left, by destroy_process_group() or the end of its script, ",
                 "when rank ", gone ? peer : rank_, " called ", describe(gone ? its : own), " #", number));
    return;
  }
  const bool first = rank_ < peer;
  auto mine = describe(own);
  auto theirs = describe(its);
  if (mine == theirs) {
    mine += " of one shape";
    theirs += " of another";
  }
  health_->poison(
      -1, c10::str("ranks ", std::min(rank_, peer), " and ", std::max(rank_, peer), " make different calls #", number,
                   ": ", first ? mine : theirs, " and ", first ? theirs : mine));
}

void CallCheck::drain() {
  std::unique_lock lock(mutex_);
  waitInterruptibly(changed_, lock, [this] { return waiting_ == 0 || failed_; });
}

void CallCheck::stop() noexcept {
  if (const auto id = std::exchange(failure_callback_, 0)) {
    health_->onFailure().remove(id);
  }
  std::unique_ptr<TaskThread> thread;
  {
    std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
    thread = std::move(thread_);
  }
  thread.reset();
  control_.reset();
}

}  // namespace torchext
