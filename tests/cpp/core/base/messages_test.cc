// Messages that a peer can feed: whatever the bytes, a parser answers with a message that keeps its rules, or throws.
//
// Every buffer is as long as its message and lies on the heap: under the address sanitizer a read beyond it is a
// failure.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/base/random.h"
#include "core/base/wire.h"
#include "core/fault/call_header.h"
#include "core/fault/fault_message.h"
#include "core/fault/heartbeat.h"
#include "core/hop/hop_messages.h"
#include "core/prague/generator_messages.h"
#include "core/transport/shared_window.h"
#include "core/transport/subset_header.h"
#include "expect_throw.h"

namespace torchext::core {
namespace {

#ifdef TORCHEXT_SANITIZED
constexpr int kRounds = 20'000;
#else
constexpr int kRounds = 200'000;
#endif
constexpr int kWorld = 9;
constexpr int kRank = 4;

using Bytes = std::vector<std::byte>;

template <typename Message>
Bytes bytesOf(const Message& message) {
  Bytes bytes(sizeof(message));
  std::memcpy(bytes.data(), &message, sizeof(message));
  return bytes;
}

// One kind of message: an example of it, and a parser that fails the test when it returns what breaks a rule.
struct Wire {
  const char* name;
  Bytes example;
  std::function<void(std::span<const std::byte>)> parse;
};

bool isRank(int rank) { return rank >= 0 && rank < kWorld; }

Wire subsetHeader() {
  SubsetHeader header;
  header.rank = kRank;
  header.numel = 1000;
  header.members_hash = hashMembers({1, kRank});
  return {"SubsetHeader", bytesOf(header), [](std::span<const std::byte> bytes) {
            const SubsetHeader parsed = parseSubsetHeader(bytes, kRank);
            EXPECT_EQ(parsed.magic, SubsetHeader::kMagic);
            EXPECT_EQ(parsed.rank, kRank);
            EXPECT_TRUE(parsed.dtype >= 0 && parsed.dtype <= 127);
            EXPECT_GE(parsed.numel, 0);
          }};
}

Wire windowAddress() {
  WindowAddress address;
  address.space = 1;
  address.process = 77;
  address.descriptor = 5;
  address.bytes = 1 << 20;
  return {"WindowAddress", bytesOf(address), [](std::span<const std::byte> bytes) {
            const WindowAddress parsed = parseWindowAddress(bytes, kRank);
            EXPECT_EQ(parsed.magic, WindowAddress::kMagic);
            EXPECT_TRUE(parsed.process >= 0 && parsed.process <= INT_MAX);
            EXPECT_TRUE(parsed.descriptor >= -1 && parsed.descriptor <= INT_MAX);
          }};
}

Wire generatorMessage() {
  GeneratorMessage message;
  message.kind = GeneratorMessage::kMeet;
  message.worker = kRank;
  return {"GeneratorMessage", bytesOf(message), [](std::span<const std::byte> bytes) {
            const GeneratorMessage parsed = parseGeneratorMessage(bytes, kWorld);
            EXPECT_TRUE(isRank(parsed.worker));
            EXPECT_TRUE(parsed.kind >= GeneratorMessage::kAsk && parsed.kind <= GeneratorMessage::kMeet);
          }};
}

Wire delivery() {
  return {"Delivery", encodeDelivery({7, {0, kRank, kWorld - 1}, 2}), [](std::span<const std::byte> bytes) {
            const AssignedGroup group = parseDelivery(bytes, kWorld, kRank);
            const std::set<int> members(group.members.begin(), group.members.end());
            EXPECT_EQ(members.size(), group.members.size());
            EXPECT_TRUE(std::is_sorted(group.members.begin(), group.members.end()));
            EXPECT_TRUE(std::all_of(members.begin(), members.end(), isRank));
            EXPECT_EQ(members.count(kRank), group.id == 0 ? 0U : 1U);
          }};
}

Wire faultMessage() {
  const auto encoded = encodeFaultMessage({FaultMessage::Kind::kAbort, 2, kRank, std::string(500, 'x')});
  return {"FaultMessage", Bytes(encoded.begin(), encoded.end()), [](std::span<const std::byte> bytes) {
            const FaultMessage parsed = parseFaultMessage(bytes, kWorld);
            EXPECT_TRUE(isRank(parsed.detected_by) && (parsed.rank == -1 || isRank(parsed.rank)));
            EXPECT_LE(parsed.reason.size(), kMaxReason);
            EXPECT_TRUE(std::none_of(parsed.reason.begin(), parsed.reason.end(),
                                     [](char c) { return static_cast<unsigned char>(c) < 0x20; }));
          }};
}

Wire heartbeat() {
  Heartbeat beat;
  beat.sender = kRank;
  beat.progress = {.started = 42, .completed = 41, .idle_ms = 7, .kind = 1};
  return {"Heartbeat", bytesOf(beat),
          [](std::span<const std::byte> bytes) { EXPECT_EQ(parseHeartbeat(bytes, kRank).sender, kRank); }};
}

Wire laggardQuery() {
  LaggardQuery query;
  query.origin = kRank;
  query.sequence = 42;
  query.ask(2, {.started = 41});
  return {"LaggardQuery", bytesOf(query), [](std::span<const std::byte> bytes) {
            const LaggardQuery parsed = parseLaggardQuery(bytes, kWorld);
            EXPECT_TRUE(isRank(parsed.origin) && (parsed.laggard == -1 || isRank(parsed.laggard)));
          }};
}

Wire stepNotice() {
  StepNotice notice;
  notice.origin = kRank;
  notice.model = 8;
  notice.meeting = 3;
  notice.steps = 1000;
  return {"StepNotice", bytesOf(notice), [](std::span<const std::byte> bytes) {
            const StepNotice parsed = parseStepNotice(bytes, kWorld);
            EXPECT_TRUE(isRank(parsed.origin) && parsed.model >= 0 && parsed.steps >= 0);
          }};
}

Wire callMessage() {
  CallMessage message;
  message.sender = kRank;
  message.number = 7;
  message.header.numel = 1000;
  message.header.line = makeCallLine("train.py:31");
  return {"CallMessage", bytesOf(message), [](std::span<const std::byte> bytes) {
            const CallMessage parsed = parseCallMessage(bytes, kRank);
            EXPECT_EQ(parsed.sender, kRank);
            EXPECT_GT(parsed.number, 0U);
          }};
}

constexpr std::uint64_t kModelBytes = 1 << 20;
constexpr std::uint64_t kDigest = 0x1234567890abcdef;

HopMessage hopExample(HopMessage::Kind kind) {
  HopMessage message;
  message.kind = kind;
  message.sender = kRank;
  message.count = kind == HopMessage::kTokens ? 3 : 0;
  message.session = 2;
  message.tag = 41;
  message.bytes = kind == HopMessage::kModel ? kModelBytes : 0;
  message.digest = kDigest;
  return message;
}

Wire hopMessage() {
  return {"HopMessage", bytesOf(hopExample(HopMessage::kTokens)), [](std::span<const std::byte> bytes) {
            const HopMessage parsed = parseHopMessage(bytes, kRank, kModelBytes, kDigest);
            EXPECT_TRUE(parsed.kind >= HopMessage::kModel && parsed.kind <= HopMessage::kLeave);
            EXPECT_EQ(parsed.sender, kRank);
            EXPECT_GE(parsed.tag, 0);
            EXPECT_EQ(parsed.bytes, parsed.kind == HopMessage::kModel ? kModelBytes : 0);
            EXPECT_EQ(parsed.count > 0, parsed.kind == HopMessage::kTokens);
            EXPECT_EQ(parsed.digest, kDigest);
          }};
}

class Messages : public ::testing::TestWithParam<Wire (*)()> {
 protected:
  // Whether the bytes were a message; any exception but MalformedMessage fails the test.
  bool accepts(const Bytes& bytes) const {
    try {
      wire_.parse(bytes);
      return true;
    } catch (const MalformedMessage&) {
      return false;
    }
  }

  const Wire wire_ = GetParam()();
};

TEST_P(Messages, TheExampleIsOne) { EXPECT_TRUE(accepts(wire_.example)); }

TEST_P(Messages, NoPrefixIsOne) {
  for (std::size_t length = 0; length < wire_.example.size(); ++length) {
    EXPECT_FALSE(accepts(Bytes(wire_.example.begin(), wire_.example.begin() + static_cast<std::ptrdiff_t>(length))));
  }
}

// Gloo lets a short message pass; what was not written is zero then.
TEST_P(Messages, APrefixFilledWithZerosKeepsTheRules) {
  for (std::size_t length = 0; length < wire_.example.size(); ++length) {
    Bytes bytes = wire_.example;
    std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(length), bytes.end(), std::byte{0});
    const bool accepted = accepts(bytes);
    EXPECT_FALSE(accepted && length < sizeof(std::uint32_t)) << length;
  }
}

TEST_P(Messages, EveryFlippedBitKeepsTheRules) {
  for (std::size_t bit = 0; bit < wire_.example.size() * 8; ++bit) {
    Bytes bytes = wire_.example;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    const bool accepted = accepts(bytes);
    EXPECT_FALSE(accepted && bit < 32) << "the magic number's bit " << bit;
  }
}

TEST_P(Messages, RandomBytesKeepTheRules) {
  Random random(1);
  for (int round = 0; round < kRounds; ++round) {
    // Half of them behind a right beginning, which lets them get further.
    const std::size_t kept = random.below(2) == 0 ? 0 : random.below(24);
    Bytes bytes(random.below(300));
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(random.below(256)); });
    std::copy_n(wire_.example.begin(), std::min({kept, bytes.size(), wire_.example.size()}), bytes.begin());
    accepts(bytes);
  }
}

TEST_P(Messages, AFewWrongBytesKeepTheRules) {
  constexpr std::byte kTelling[] = {std::byte{0}, std::byte{1}, std::byte{0x7f}, std::byte{0x80}, std::byte{0xff}};
  Random random(2);
  for (int round = 0; round < kRounds; ++round) {
    Bytes bytes = wire_.example;
    for (std::uint32_t i = random.below(5); i < 5; ++i) {
      bytes[random.below(static_cast<std::uint32_t>(bytes.size()))] = kTelling[random.below(5)];
    }
    accepts(bytes);
  }
}

std::string nameOf(const ::testing::TestParamInfo<Wire (*)()>& wire) { return wire.param().name; }

INSTANTIATE_TEST_SUITE_P(All, Messages,
                         ::testing::Values(subsetHeader, windowAddress, generatorMessage, delivery, faultMessage,
                                           hopMessage, heartbeat, laggardQuery, stepNotice, callMessage),
                         nameOf);

TEST(Delivery, RulesOfItsMembers) {
  const auto parse = [](const AssignedGroup& group) { return parseDelivery(encodeDelivery(group), kWorld, kRank); };
  const AssignedGroup group = parse({7, {0, kRank, 8}, -3});
  EXPECT_EQ(group.id, 7U);
  EXPECT_EQ(group.members, (std::vector<int>{0, kRank, 8}));
  EXPECT_EQ(group.behind, -3);
  EXPECT_TRUE(parse({0, {}, 0}).members.empty());
  for (const std::vector<int>& members :
       {std::vector<int>{}, {0, 1}, {kRank, 0}, {kRank, kRank}, {-1, kRank}, {kRank, kWorld}}) {
    EXPECT_THROW_MESSAGE(parse({7, members, 0}), MalformedMessage, "group 7 for rank 4");
  }
  EXPECT_THROW_MESSAGE(parse({0, {kRank}, 0}), MalformedMessage, "group 0");
}

TEST(FaultMessage, AReasonIsCutBetweenCharacters) {
  const auto reasonOf = [](const std::string& reason) {
    return parseFaultMessage(encodeFaultMessage({FaultMessage::Kind::kPeerDied, -1, 0, reason}), kWorld).reason;
  };
  EXPECT_EQ(reasonOf("out of memory\n"), "out of memory ");
  EXPECT_EQ(reasonOf(std::string(kMaxReason - 1, 'x') + "\u00e9"), std::string(kMaxReason - 1, 'x'));
}

TEST(FaultMessage, EveryKindArrivesAsItIs) {
  for (const auto kind : {FaultMessage::Kind::kPeerDied, FaultMessage::Kind::kLeave, FaultMessage::Kind::kFailure,
                          FaultMessage::Kind::kDeparture, FaultMessage::Kind::kAbort}) {
    const FaultMessage parsed = parseFaultMessage(encodeFaultMessage({kind, 3, kRank, "a reason"}), kWorld);
    EXPECT_EQ(parsed.kind, kind);
    EXPECT_EQ(parsed.rank, 3);
    EXPECT_EQ(parsed.detected_by, kRank);
  }
}

TEST(SubsetHeader, AnErrorNamesTheSenderAndWhatCame) {
  SubsetHeader header;
  header.rank = 1;
  EXPECT_THROW_MESSAGE(parseSubsetHeader(bytesOf(header), 2), MalformedMessage, "header from rank 2");
  EXPECT_THROW_MESSAGE(parseSubsetHeader(Bytes(47), 2), MalformedMessage, "47 bytes: expected 48");
}

TEST(HopMessage, EveryKindIsTakenAndItsRulesAreChecked) {
  const auto parse = [](const HopMessage& message) {
    return parseHopMessage(bytesOf(message), kRank, kModelBytes, kDigest);
  };
  for (const auto kind :
       {HopMessage::kModel, HopMessage::kTokens, HopMessage::kAck, HopMessage::kPause, HopMessage::kLeave}) {
    const HopMessage example = hopExample(kind);
    const HopMessage parsed = parse(example);
    EXPECT_EQ(parsed.kind, kind);
    EXPECT_EQ(parsed.session, 2U);
    EXPECT_EQ(parsed.tag, 41);
    const auto broken = [&](auto change) {
      HopMessage message = example;
      change(message);
      EXPECT_THROW_MESSAGE(parse(message), MalformedMessage, "message from rank 4");
    };
    broken([](HopMessage& message) { message.version = 2; });
    broken([](HopMessage& message) { message.sender = 5; });
    broken([](HopMessage& message) { message.count = message.count == 0 ? 1 : 0; });
    broken([](HopMessage& message) { message.count = -1; });
    broken([](HopMessage& message) { message.tag = -1; });
    broken([](HopMessage& message) { message.bytes += 8; });
    broken([](HopMessage& message) { message.digest ^= 1; });
  }
}

}  // namespace
}  // namespace torchext::core
