// shardMessages() turns the rounds of a schedule into one rank's messages: parts of a buffer, and when each may leave.
//
// Adjacent chunks travel together, in equal segments of whole elements: a short one at the end would cost a message and
// hide nothing. Along a grid a round has two at least, so that one travels while the other is added. What is sent waits
// for all that came in earlier rounds to the same memory, and for nothing else.
// Both lists are in the order of rounds. If every rank posts in that order, messages of a pair of ranks match.
#pragma once

#include <cstddef>
#include <vector>

#include "core/transport/shard_schedule.h"

namespace torchext {

struct ShardMessage {
  std::byte* data;
  std::size_t bytes;
  int peer;
  std::size_t round;
  std::size_t after;  // of what is sent: how many must have arrived
};

struct ShardMessages {
  std::vector<ShardMessage> outgoing;
  std::vector<ShardMessage> incoming;
};

struct ShardSizes {
  std::size_t chunk_bytes;
  std::size_t element_bytes;
  std::size_t segment_bytes;  // the largest message
  // Of rounds that do not depend on each other: how many are sent ahead of what arrives. Too many at a time would be
  // many senders a link. 0: each round depends on those before.
  std::size_t independent;
};

// data: of n chunks.
ShardMessages shardMessages(const std::vector<core::ShardRound>& rounds, std::byte* data, const ShardSizes& sizes);

}  // namespace torchext
