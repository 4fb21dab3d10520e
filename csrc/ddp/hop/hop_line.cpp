#include "ddp/hop/hop_line.h"

#include <c10/util/Exception.h>

#include "c10d/fault/group_waits.h"
#include "c10d/fault/parse_message.h"
#include "c10d/threads/start_thread.h"

namespace torchext {

using core::HopMessage;

HopLine::HopLine(AttachableBackend& group, HopLineOwner& owner, int peer, int tag)
    : group_(group), owner_(owner), peer_(peer), tag_(tag), transport_(group.dataTransport()) {}

void HopLine::start() {
  receiver_ = startThread("tx_hop_recv", [this] { run([this] { receiveAll(); }); });
  sender_ = startThread("tx_hop_send", [this] { run([this] { sendAll(); }); });
}

template <class Loop>
void HopLine::run(Loop loop) {
  try {
    loop();
  } catch (...) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_) {
        return;
      }
    }
    owner_.failed(std::current_exception());
  }
}

void HopLine::await(Wait which, const PointToPoint::WorkPtr& work, const char* what) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_[which] = work;
    if (stopped_) {
      work->abort();
    }
  }
  waitPointToPoint(*group_.health(), work, kNoTimeout, OpInfo{.name = what, .peer = peer_, .background = true});
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_[which] = nullptr;
}

void HopLine::receiveAll() {
  while (true) {
    // Gloo accepts a message that is too short: it must not be completed by the one before.
    header_in_.fill(std::byte{0});
    await(kHeaderIn, transport_.recv(header_in_.data(), header_in_.size(), peer_, tag_), "hop message");
    const HopMessage header =
        parseMessage("hop", core::parseHopMessage, header_in_, peer_, owner_.modelBytes(), owner_.digest());
    if (header.kind == HopMessage::kModel) {
      std::byte* to = owner_.destination(header);
      if (to == nullptr) {
        return;
      }
      await(kModelIn, transport_.recv(to, header.bytes, peer_, tag_ + 1), "hop model");
    }
    if (!owner_.received(header)) {
      return;
    }
  }
}

void HopLine::sendAll() {
  while (const auto out = owner_.next()) {
    header_out_ = out->header;
    const auto header = transport_.send(&header_out_, sizeof(header_out_), peer_, tag_);
    if (out->model != nullptr) {
      const auto model = transport_.send(out->model, out->header.bytes, peer_, tag_ + 1);
      await(kHeaderOut, header, "hop message");
      await(kModelOut, model, "hop model");
    } else {
      await(kHeaderOut, header, "hop message");
    }
    owner_.sent(out->header);
  }
}

void HopLine::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    for (const auto& work : waiting_) {
      if (work) {
        work->abort();
      }
    }
  }
  for (std::thread* thread : {&receiver_, &sender_}) {
    if (thread->joinable()) {
      thread->join();
    }
  }
}

}  // namespace torchext
