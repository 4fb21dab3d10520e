#include "kit/fake_network.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/maximum.h>
#include <c10/util/StringUtil.h>

#include "c10d/backend/torch_compat.h"
#include "c10d/threads/task_thread.h"

namespace torchext::kit {
namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

std::string closedText(int peer) { return c10::str("Connection closed by peer [rank ", peer, "]"); }

// A collective under way.
class FutureWork final : public CompatWork {
 public:
  FutureWork(int rank, c10d::OpType type, FuturePtr future) : CompatWork(rank, type), future_(std::move(future)) {}
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    future_->waitAndThrow();
    return true;
  }
  Tensors result() override { return future_->value().toTensorVector(); }
  FuturePtr getFuture() override { return future_; }

 protected:
  std::chrono::milliseconds workTimeout() const override { return kNoTimeout; }

 private:
  const FuturePtr future_;
};

}  // namespace

// A message under way.
class MessageWork final : public CompatWork {
 public:
  MessageWork(std::shared_ptr<FakeNetwork> network, FakeNetwork::MessagePtr message, int rank)
      : CompatWork(rank, message->sends ? c10d::OpType::SEND : c10d::OpType::RECV),
        network_(std::move(network)),
        message_(std::move(message)) {}
  ~MessageWork() override { network_->forget(message_); }
  bool isCompleted() override {
    const std::lock_guard lock(network_->mutex_);
    return message_->state != FakeNetwork::State::kPending;
  }
  bool wait(std::chrono::milliseconds timeout) override { return network_->wait(*message_, timeout); }
  int sourceRank() const override {
    const std::lock_guard lock(network_->mutex_);
    return message_->arrived_from;
  }
  void abort() override {
    const std::lock_guard lock(network_->mutex_);
    message_->aborted = true;
    message_->changed.notify_all();
  }

 protected:
  std::chrono::milliseconds workTimeout() const override { return kNoTimeout; }

 private:
  const std::shared_ptr<FakeNetwork> network_;
  const FakeNetwork::MessagePtr message_;
};

class FakeBackend final : public CompatBackend {
 public:
  FakeBackend(std::shared_ptr<FakeNetwork> network, int rank, int size)
      : CompatBackend(rank, size),
        network_(std::move(network)),
        options_(c10::make_intrusive<Options>("fake", network_->timeout_)) {}
  ~FakeBackend() override { network_->close(rank_); }

  const std::string getBackendName() const override { return "fake"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds /*timeout*/) override {}
  void shutdown() override {}

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return post(tensors.at(0), rank_, destination, tag, true);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return post(tensors.at(0), source, rank_, tag, false);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override { return post(tensors.at(0), -1, rank_, tag, false); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    if (opts.reduceOp == c10d::ReduceOp::BAND) {
      throw std::runtime_error("floats have no bits to combine");
    }
    return enter(c10d::OpType::ALLREDUCE, c10::str("reduce ", static_cast<int>(opts.reduceOp.op_)), tensors, {});
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return enter(c10d::OpType::BROADCAST, c10::str("broadcast ", opts.rootRank), tensors, {});
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& /*opts*/) override {
    return enter(c10d::OpType::ALLGATHER, "gather", inputs, outputs.at(0));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& /*opts*/) override {
    return enter(c10d::OpType::_ALLGATHER_BASE, "gather", {input}, output.chunk(getSize()));
  }
  WorkPtr barrier(const c10d::BarrierOptions& /*opts*/) override {
    return enter(c10d::OpType::BARRIER, "barrier", {}, {});
  }

 protected:
  void extendTimeout(const std::chrono::milliseconds& /*timeout*/) override {}
  WorkPtr gatherSingle(at::Tensor& /*output*/, at::Tensor& /*input*/, const c10d::GatherOptions& /*opts*/) override {
    throw std::runtime_error("the fake network gathers nothing");
  }
  c10d::Backend* deviceInner() const override { return nullptr; }

 private:
  WorkPtr post(const at::Tensor& tensor, int source, int destination, int tag, bool sends) {
    auto message = std::make_shared<FakeNetwork::Message>();
    message->tensor = tensor;
    message->source = source;
    message->destination = destination;
    message->tag = tag;
    message->sends = sends;
    network_->post(message);
    return c10::make_intrusive<MessageWork>(network_, message, rank_);
  }

  WorkPtr enter(c10d::OpType type, const std::string& what, const Tensors& tensors, const Tensors& outputs) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    std::string call = what;
    for (const at::Tensor& tensor : tensors) {
      call += c10::str(" ", tensor.scalar_type(), " ", tensor.numel());
    }
    network_->enter(rank_, ++calls_,
                    {call, tensors, outputs, [thread = thread_, future, tensors](const std::string& error) {
                       thread->post([future, tensors, error] {
                         if (error.empty()) {
                           future->markCompleted(tensors);
                         } else {
                           future->setError(std::make_exception_ptr(std::runtime_error(error)));
                         }
                       });
                     }});
    return c10::make_intrusive<FutureWork>(rank_, type, future);
  }

  const std::shared_ptr<FakeNetwork> network_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<std::uint64_t> calls_{0};
  // Shared: a peer may complete a call of this rank while the rank ends.
  const std::shared_ptr<TaskThread> thread_ = std::make_shared<TaskThread>("fake_gloo");
};

c10::intrusive_ptr<c10d::Backend> FakeNetwork::connect(int rank) {
  return c10::make_intrusive<FakeBackend>(shared_from_this(), rank, size_);
}

void FakeNetwork::count(std::map<int, Trigger>& triggers, int rank, std::vector<std::function<void()>>& events) {
  const auto found = triggers.find(rank);
  if (found != triggers.end() && --found->second.left <= 0) {
    events.push_back(std::move(found->second.event));
    triggers.erase(found);
  }
}

void FakeNetwork::post(const MessagePtr& message) {
  std::vector<std::function<void()>> events;
  const int self = message->sends ? message->source : message->destination;
  const int peer = message->sends ? message->destination : message->source;
  {
    const std::lock_guard lock(mutex_);
    if (message->sends) {
      ++sends_[self];
      count(on_send_, self, events);
    }
  }
  for (const auto& event : events) {
    event();
  }
  events.clear();
  {
    const std::lock_guard lock(mutex_);
    if (closed_.contains(self) || closed_.contains(peer)) {
      throw std::runtime_error(closedText(peer));
    }
    Box& box = boxes_[{message->destination, message->tag}];
    (message->sends ? box.sends : box.receives).push_back(message);
    match(box);
    events.swap(received_);
  }
  for (const auto& event : events) {
    event();
  }
}

void FakeNetwork::match(Box& box) {
  for (auto receive = box.receives.begin(); receive != box.receives.end();) {
    const auto send = std::find_if(box.sends.begin(), box.sends.end(), [&](const MessagePtr& candidate) {
      return ((*receive)->source == -1 || (*receive)->source == candidate->source) && !cut(candidate->source) &&
             !cut(candidate->destination) && !jammed_.contains({candidate->source, candidate->destination});
    });
    if (send == box.sends.end()) {
      ++receive;
      continue;
    }
    if ((*send)->gone || (*receive)->gone) {
      jammed_.emplace((*send)->source, (*send)->destination);
      continue;
    }
    deliver(**send, **receive);
    box.sends.erase(send);
    receive = box.receives.erase(receive);
  }
}

void FakeNetwork::deliver(Message& send, Message& receive) {
  const auto bytes = send.tensor.nbytes();
  if (bytes > receive.tensor.nbytes()) {
    send.error = receive.error = "the message is longer than its receive";
    send.state = receive.state = State::kClosed;
  } else {
    if (bytes > 0) {
      std::memcpy(receive.tensor.mutable_data_ptr(), send.tensor.const_data_ptr(), bytes);
    }
    receive.arrived_from = send.source;
    send.state = receive.state = State::kDone;
    count(on_receive_, receive.destination, received_);
  }
  send.changed.notify_all();
  receive.changed.notify_all();
}

void FakeNetwork::forget(const MessagePtr& message) {
  const std::lock_guard lock(mutex_);
  message->gone = true;
  message->tensor = at::Tensor();
}

bool FakeNetwork::wait(Message& message, std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) {
    timeout = timeout_;
  }
  const int self = message.sends ? message.source : message.destination;
  {
    std::unique_lock lock(mutex_);
    const bool over =
        message.changed.wait_for(lock, timeout, [&] { return message.state != State::kPending || message.aborted; });
    if (message.state == State::kDone) {
      return true;
    }
    if (message.state == State::kClosed) {
      throw std::runtime_error(message.error);
    }
    if (over) {
      return false;
    }
  }
  close(self);
  throw std::runtime_error(c10::str("Timed out waiting ", timeout.count(), "ms for ", message.sends ? "send" : "recv",
                                    " operation to complete"));
}

void FakeNetwork::close(int rank) {
  std::vector<std::pair<std::function<void(const std::string&)>, std::string>> failed;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.insert(rank).second) {
      return;
    }
    for (auto& [where, box] : boxes_) {
      for (auto* queue : {&box.sends, &box.receives}) {
        std::erase_if(*queue, [&](const MessagePtr& message) {
          if (message->source != rank && message->destination != rank) {
            return false;
          }
          message->error = closedText(message->source == rank ? message->source : message->destination);
          message->state = State::kClosed;
          message->changed.notify_all();
          return true;
        });
      }
    }
    for (auto& [number, entries] : calls_) {
      for (auto& [entered, entry] : entries) {
        failed.emplace_back(std::move(entry.complete), closedText(rank));
      }
    }
    calls_.clear();
  }
  for (const auto& [complete, error] : failed) {
    complete(error);
  }
}

void FakeNetwork::freeze(int rank) {
  const std::lock_guard lock(mutex_);
  frozen_.insert(rank);
}

void FakeNetwork::thaw(int rank) {
  std::vector<std::function<void()>> events;
  std::vector<std::uint64_t> numbers;
  {
    const std::lock_guard lock(mutex_);
    frozen_.erase(rank);
    for (auto& [where, box] : boxes_) {
      match(box);
    }
    for (const auto& [number, entries] : calls_) {
      numbers.push_back(number);
    }
    events.swap(received_);
  }
  for (const auto& event : events) {
    event();
  }
  for (const std::uint64_t number : numbers) {
    complete(number);
  }
}

void FakeNetwork::afterSends(int rank, int count, std::function<void()> event) {
  const std::lock_guard lock(mutex_);
  on_send_[rank] = {count, std::move(event)};
}

void FakeNetwork::afterReceives(int rank, int count, std::function<void()> event) {
  const std::lock_guard lock(mutex_);
  on_receive_[rank] = {count, std::move(event)};
}

int FakeNetwork::sends(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = sends_.find(rank);
  return found == sends_.end() ? 0 : found->second;
}

std::size_t FakeNetwork::pending() const {
  const std::lock_guard lock(mutex_);
  std::size_t waiting = calls_.size();
  for (const auto& [where, box] : boxes_) {
    waiting += box.sends.size() + box.receives.size();
  }
  return waiting;
}

bool FakeNetwork::jammed() const {
  const std::lock_guard lock(mutex_);
  return !jammed_.empty();
}

int FakeNetwork::mixedCalls() const {
  const std::lock_guard lock(mutex_);
  return mixed_;
}

void FakeNetwork::enter(int rank, std::uint64_t number, Entry entry) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.empty()) {
      throw std::runtime_error(closedText(*closed_.begin()));
    }
    calls_[number].emplace(rank, std::move(entry));
  }
  complete(number);
}

void FakeNetwork::complete(std::uint64_t number) {
  std::map<int, Entry> entries;
  std::string error;
  {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(number);
    if (found == calls_.end() || found->second.size() < static_cast<std::size_t>(size_) || !frozen_.empty()) {
      return;
    }
    entries = std::move(found->second);
    calls_.erase(found);
    const std::string& call = entries.at(0).call;
    if (std::any_of(entries.begin(), entries.end(), [&](const auto& own) { return own.second.call != call; })) {
      ++mixed_;
      error = "ranks met in different calls";
    }
  }
  // Nobody touches the tensors meanwhile: all ranks have entered, and none has been told.
  const std::string& call = entries.at(0).call;
  for (std::size_t i = 0; error.empty() && i < entries.at(0).tensors.size(); ++i) {
    if (call.starts_with("reduce")) {
      at::Tensor result = entries.at(0).tensors[i].clone();
      for (int other = 1; other < size_; ++other) {
        const at::Tensor& term = entries.at(other).tensors[i];
        result = call.starts_with("reduce 0") ? result.add(term) : at::maximum(result, term);
      }
      for (auto& [own, its] : entries) {
        its.tensors[i].copy_(result);
      }
    } else if (call.starts_with("broadcast")) {
      const at::Tensor& root = entries.at(std::stoi(call.substr(10))).tensors[i];
      for (auto& [own, its] : entries) {
        its.tensors[i].copy_(root);
      }
    } else if (call.starts_with("gather")) {
      for (auto& [own, its] : entries) {
        for (int source = 0; source < size_; ++source) {
          its.outputs[static_cast<std::size_t>(source)].copy_(entries.at(source).tensors[0]);
        }
      }
    }
  }
  for (const auto& [own, its] : entries) {
    its.complete(error);
  }
}

}  // namespace torchext::kit
