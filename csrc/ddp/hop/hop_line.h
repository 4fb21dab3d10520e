// HopLine carries the messages between one Hop worker and one neighbour, each direction on a thread of its own.
//
// Neither thread ever makes the training thread wait for a neighbour that is late. The receiving thread waits for a
// header without a time limit (a neighbour may be slow, or evaluate), asks the owner where the model's bytes go, and
// has them written there: no copy besides. The sending thread takes what the owner has next and waits until it is out,
// without a limit too: the limit is that of the training thread, which knows whom it needs.
//
// Both are ended by stop(), by a failure of the group, or by the owner's answers.
// Wire: core/hop/hop_messages.h; a header on tag, the bytes of a model on tag + 1.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "c10d/backend/attachable_backend.h"
#include "c10d/transport/point_to_point.h"
#include "core/hop/hop_messages.h"

namespace torchext {

// The queues behind a line. All are called on its threads.
class HopLineOwner {
 public:
  struct Outgoing {
    core::HopMessage header;
    const std::byte* model = nullptr;  // of header.bytes, untouched until sent()
  };

  virtual ~HopLineOwner() = default;

  // What goes out next; blocks until there is something. Nothing: nothing will follow.
  virtual std::optional<Outgoing> next() = 0;
  virtual void sent(const core::HopMessage& header) = 0;
  // Where the bytes of a model go; may block while there is no room. Null: the worker has stopped.
  virtual std::byte* destination(const core::HopMessage& header) = 0;
  // A message has arrived, with its bytes if it is a model. False: nothing will follow.
  virtual bool received(const core::HopMessage& header) = 0;
  // The line broke, or the neighbour sent what breaks the protocol. Not called after stop().
  virtual void failed(std::exception_ptr error) = 0;

  virtual std::uint64_t modelBytes() const = 0;
  virtual std::uint64_t digest() const = 0;
};

class HopLine {
 public:
  // tag: the first of two on the inner group of the CPU. Owner and group outlive the line.
  HopLine(AttachableBackend& group, HopLineOwner& owner, int peer, int tag);
  ~HopLine() { stop(); }
  HopLine(const HopLine&) = delete;
  HopLine& operator=(const HopLine&) = delete;

  // Starts both threads. Where one is refused, stop() ends the other.
  void start();
  // Ends the waits of both threads, then the threads, which the owner must let go (next, destination) at the same time.
  // Safe twice.
  void stop();

 private:
  enum Wait : std::size_t { kHeaderIn, kModelIn, kHeaderOut, kModelOut };

  void receiveAll();
  void sendAll();
  void await(Wait which, const PointToPoint::WorkPtr& work, const char* what);
  template <class Loop>
  void run(Loop loop);

  AttachableBackend& group_;
  HopLineOwner& owner_;
  const int peer_;
  const int tag_;
  PointToPoint transport_;
  // Of the header that is on its way, each of its own thread. Gloo may write and read them until their works below are
  // gone, also when the wait has ended with an error: on the stacks they would be gone first.
  std::array<std::byte, sizeof(core::HopMessage)> header_in_{};
  core::HopMessage header_out_;
  std::mutex mutex_;                              // guards what follows
  std::array<PointToPoint::WorkPtr, 4> waiting_;  // by Wait
  bool stopped_ = false;
  std::thread receiver_;
  std::thread sender_;
};

}  // namespace torchext
