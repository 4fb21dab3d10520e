// TransferNetwork moves what stages send to their neighbours.
//
// Links are independent where no stage has port_seconds, and in mode "ideal": a transfer begins when its link can.
// Else each rank has one port to send and one to receive, which its two neighbours share. A transfer takes the port of
// its sender and that of its receiver for port_seconds, the time of its bytes; latency takes none. It begins when its
// link can and both ports are free. The earliest one begins first, and of equals the one that was ready first.
//
// A receive is announced to the sender by a message on the same port. That message stands behind what its host has
// queued of a transfer, and this is half of the rest: Gloo over token buckets took 0.46 and 0.53 of it.
#pragma once

#include <cstddef>
#include <tuple>
#include <vector>

#include "core/pipeline/pipeline_profile.h"
#include "core/pipeline/transfer_link.h"

namespace torchext::core {

class TransferNetwork {
 public:
  // ideal: receives are posted from the start, and links independent. The stages outlive it.
  TransferNetwork(const std::vector<StageTimes>& stages, std::size_t microbatches, bool ideal);

  void sendForward(std::size_t rank, int microbatch, double now) { send(2 * rank, microbatch, now); }
  void sendBackward(std::size_t rank, int microbatch, double now) { send(2 * (rank - 1) + 1, microbatch, now); }
  void postForward(std::size_t rank, double now) { post(2 * (rank - 1), now); }  // for what comes from rank - 1
  void postBackward(std::size_t rank, double now) { post(2 * rank + 1, now); }   // for what comes from rank + 1

  // From `stage` to the next, and back to `stage`.
  const TransferLink& forward(std::size_t stage) const { return links_[2 * stage]; }
  const TransferLink& backward(std::size_t stage) const { return links_[2 * stage + 1]; }

  // What happens next where ports are shared, once no rank can go on without it. False: nothing.
  bool advance();

 private:
  // The earliest first; fields in the order in which they are compared.
  struct Event {
    double seconds = TransferLink::kUnknown;
    bool announces = false;
    double ready_seconds = TransferLink::kUnknown;
    std::size_t link = 0;
    friend bool operator<(const Event& a, const Event& b) {
      return std::tie(a.seconds, a.announces, a.ready_seconds, a.link) <
             std::tie(b.seconds, b.announces, b.ready_seconds, b.link);
    }
  };

  void send(std::size_t link, int microbatch, double now);
  void post(std::size_t link, double now);
  void moveAll(TransferLink& link);
  Event transferOf(std::size_t link) const;
  Event announcementOf(std::size_t link) const;

  // Links alternate: 2 j goes from stage j to the next, and 2 j + 1 back.
  static std::size_t sender(std::size_t link) { return (link + 1) / 2; }
  static std::size_t receiver(std::size_t link) { return link / 2 + 1 - link % 2; }

  const std::vector<StageTimes>& stages_;
  bool shared_;
  std::vector<TransferLink> links_;
  std::vector<double> sends_until_;     // [rank] its port is taken
  std::vector<double> receives_until_;  // [rank]
};

}  // namespace torchext::core
