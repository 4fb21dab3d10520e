#include "c10d/transport/shard_messages.h"

#include <algorithm>

#include "core/base/check.h"

namespace torchext {
namespace {

std::size_t divideUp(std::size_t whole, std::size_t part) { return (whole + part - 1) / part; }

class ShardMessageLists {
 public:
  ShardMessageLists(std::byte* data, const ShardSizes& sizes) : data_(data), sizes_(sizes) {}

  ShardMessages of(const std::vector<core::ShardRound>& rounds) const {
    ShardMessages messages;
    for (std::size_t round = 0; const core::ShardRound& each : rounds) {
      addSegments(messages.outgoing, round, each.to, each.sent);
      addSegments(messages.incoming, round, each.from, each.received);
      ++round;
    }
    for (std::size_t number = 0; ShardMessage & message : messages.outgoing) {
      ++number;
      message.after =
          sizes_.independent > 0 ? number - std::min(number, sizes_.independent) : neededBy(message, messages.incoming);
    }
    return messages;
  }

 private:
  void addSegments(std::vector<ShardMessage>& messages, std::size_t round, int peer,
                   const std::vector<int>& chunks) const {
    const std::size_t most = std::max<std::size_t>(1, sizes_.segment_bytes / sizes_.element_bytes);
    for (std::size_t first = 0, end = 0; first < chunks.size(); first = end) {
      for (end = first + 1; end < chunks.size() && chunks[end] == chunks[end - 1] + 1;) {
        ++end;
      }
      const std::size_t bytes = (end - first) * sizes_.chunk_bytes;
      const std::size_t elements = bytes / sizes_.element_bytes;
      const bool alone = sizes_.independent == 0 && end - first == chunks.size();
      const std::size_t segments = std::max<std::size_t>(alone ? 2 : 1, divideUp(elements, most));
      const std::size_t segment_bytes = divideUp(elements, segments) * sizes_.element_bytes;
      std::byte* const begin = data_ + core::index(chunks[first]) * sizes_.chunk_bytes;
      for (std::size_t at = 0; at < bytes; at += segment_bytes) {
        messages.push_back({begin + at, std::min(segment_bytes, bytes - at), peer, round, 0});
      }
    }
  }

  static std::size_t neededBy(const ShardMessage& message, const std::vector<ShardMessage>& incoming) {
    const auto needed = std::find_if(incoming.rbegin(), incoming.rend(), [&](const ShardMessage& other) {
      return other.round < message.round && other.data < message.data + message.bytes &&
             message.data < other.data + other.bytes;
    });
    return static_cast<std::size_t>(incoming.rend() - needed);
  }

  std::byte* data_;
  const ShardSizes& sizes_;
};

}  // namespace

ShardMessages shardMessages(const std::vector<core::ShardRound>& rounds, std::byte* data, const ShardSizes& sizes) {
  return ShardMessageLists(data, sizes).of(rounds);
}

}  // namespace torchext
