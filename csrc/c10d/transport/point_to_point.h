// PointToPoint: messages between ranks of an inner backend, with one owner for every wait.
//
// The algorithms over subsets of ranks (subset_allreduce.h) and the group generator's service send and receive through
// this small class, so that they need to know neither how a wait is interrupted nor how a dead peer is named: both are
// the WaitFunction's business (waitPointToPoint of group_waits.h in production). That a group ends where a peer sends
// what is malformed is the RefuseFunction's.
//
// Ownership: holds the inner backend. The caller keeps a message's memory alive until wait() has returned. One that
// nobody will wait for is to be handed to keep(), where the connection is to live on: Gloo takes no receive back, and
// what comes for one that is gone, or the turn of a send that is, stops all that comes after it from or to that rank.
// Threads: any; Gloo serializes per connection. Messages of one (source, destination, tag) match in the order posted.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace torchext {

class PointToPoint {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Blocks until the work is done; throws an error that names `peer` and `what` otherwise.
  using WaitFunction = std::function<void(const WorkPtr& work, int peer, const char* what)>;
  // Whether what is waited for has come, asked again and again; may block for as long as it is told.
  using Look = std::function<bool(std::chrono::milliseconds limit)>;
  // The same for what is no work of the backend.
  using WaitUntilFunction = std::function<void(const Look& look, int peer, const char* what)>;

  // `peer` sent what is malformed, and others may wait for the rank that got it. Returns the error to throw.
  using RefuseFunction = std::function<std::exception_ptr(int peer, const char* what, const std::string& error)>;

  // Takes works of tensors that own their memory, until the connections are closed.
  using KeepFunction = std::function<void(const WorkPtr& work)>;

  // keep: null where a wait that fails is followed by the end of the connections.
  PointToPoint(c10::intrusive_ptr<c10d::Backend> backend, WaitFunction wait, WaitUntilFunction wait_until,
               RefuseFunction refuse, KeepFunction keep = nullptr)
      : backend_(std::move(backend)),
        wait_(std::move(wait)),
        wait_until_(std::move(wait_until)),
        refuse_(std::move(refuse)),
        keep_(std::move(keep)) {}

  int rank() const { return backend_->getRank(); }
  int size() const { return backend_->getSize(); }

  // A receive may be longer than the message that arrives (Gloo copies what came), never shorter.
  WorkPtr send(const void* data, std::size_t bytes, int destination, int tag) const {
    return send(view(const_cast<void*>(data), bytes), destination, tag);
  }
  WorkPtr recv(void* data, std::size_t bytes, int source, int tag) const {
    return recv(view(data, bytes), source, tag);
  }
  // The same of contiguous memory, which the work holds.
  WorkPtr send(at::Tensor message, int destination, int tag) const {
    std::vector<at::Tensor> tensors{std::move(message)};
    return backend_->send(tensors, destination, tag);
  }
  WorkPtr recv(at::Tensor memory, int source, int tag) const {
    std::vector<at::Tensor> tensors{std::move(memory)};
    return backend_->recv(tensors, source, tag);
  }
  WorkPtr recvAnySource(at::Tensor memory, int tag) const {
    std::vector<at::Tensor> tensors{std::move(memory)};
    return backend_->recvAnysource(tensors, tag);
  }
  void wait(const WorkPtr& work, int peer, const char* what) const { wait_(work, peer, what); }
  void waitUntil(const Look& look, int peer, const char* what) const { wait_until_(look, peer, what); }
  std::exception_ptr refuse(int peer, const char* what, const std::string& error) const {
    return refuse_(peer, what, error);
  }

  // work: may be null.
  void keep(const WorkPtr& work) const {
    if (work && keep_) {
      keep_(work);
    }
  }

  const c10::intrusive_ptr<c10d::Backend>& backend() const { return backend_; }

 private:
  static at::Tensor view(void* data, std::size_t bytes) {
    return at::from_blob(data, {static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  WaitFunction wait_;
  WaitUntilFunction wait_until_;
  RefuseFunction refuse_;
  KeepFunction keep_;
};

}  // namespace torchext
