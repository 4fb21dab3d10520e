#include "core/fault/call_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/random.h"
#include "core/base/wire.h"

namespace torchext::core {
namespace {

#ifdef TORCHEXT_SANITIZED
constexpr int kLedgerRounds = 200;
#else
constexpr int kLedgerRounds = 2'000;
#endif

CallHeader call(int numel) {
  CallHeader header;
  header.numel = numel;
  return header;
}

// How many of the calls were not predicted.
int surprises(CallLedger& ledger, const std::vector<int>& calls) {
  return static_cast<int>(std::count_if(calls.begin(), calls.end(), [&](int c) { return !ledger.record(call(c)); }));
}

TEST(CallHeader, ALineIsItsEndInPrintableCharacters) {
  EXPECT_EQ(textOf(makeCallLine("train.py:31")), "train.py:31");
  EXPECT_EQ(textOf(makeCallLine("")), "");
  EXPECT_EQ(textOf(CallLine{}), "");
  const std::string longest = std::string(27, 'x') + ":123";
  EXPECT_EQ(longest.size() + 1, CallLine{}.size());
  EXPECT_EQ(textOf(makeCallLine(longest)), longest);
  EXPECT_EQ(textOf(makeCallLine("a/folder" + longest)), longest);
  EXPECT_EQ(textOf(makeCallLine(std::string_view("\0\n\x1b[2J\x7f\xc3\xa9:1", 11))), "???[2J???:1");
}

TEST(CallHeader, ALineThatIsNoTextIsMalformed) {
  const auto parse = [](const CallLine& line) {
    CallMessage message;
    message.sender = 2;
    message.number = 7;
    message.header.line = line;
    return parseCallMessage(std::as_bytes(std::span(&message, 1)), 2).header.line;
  };
  CallLine line = makeCallLine("train.py:31");
  EXPECT_EQ(parse(line), line);
  line[3] = '\n';
  EXPECT_THROW(parse(line), MalformedMessage);
  line[3] = '\0';  // with more behind it
  EXPECT_THROW(parse(line), MalformedMessage);
  line.fill('x');  // without an end
  EXPECT_THROW(parse(line), MalformedMessage);
}

TEST(CallHeader, EveryFieldCounts) {
  const CallHeader base{
      .kind = 1, .reduce_op = 2, .dtype = 3, .root = 4, .numel = 5, .shapes = 6, .line = makeCallLine("a.py:7")};
  std::vector<CallHeader> others(7, base);
  ++others[0].kind;
  ++others[1].reduce_op;
  ++others[2].dtype;
  ++others[3].root;
  ++others[4].numel;
  ++others[5].shapes;
  others[6].line = makeCallLine("a.py:8");
  for (const auto& other : others) {
    EXPECT_NE(other, base);
    EXPECT_NE(other.digest(), base.digest());
  }
}

TEST(CallLedger, RemembersTheLastCalls) {
  CallLedger ledger;
  EXPECT_FALSE(ledger.find(0) || ledger.find(1));
  const int count = 3 * static_cast<int>(CallLedger::kPast) + 5;
  for (int i = 1; i <= count; ++i) {
    ledger.record(call(i));
    ASSERT_EQ(ledger.count(), static_cast<std::uint64_t>(i));
    ASSERT_EQ(ledger.find(ledger.count()), call(i));
    ASSERT_FALSE(ledger.find(ledger.count() + 1));
  }
  const auto last = ledger.count();
  EXPECT_EQ(ledger.find(last - CallLedger::kPast + 1), call(count - static_cast<int>(CallLedger::kPast) + 1));
  EXPECT_FALSE(ledger.find(last - CallLedger::kPast));
}

TEST(CallLedger, PredictsALoopOfDifferentCallsFromItsSecondRound) {
  CallLedger ledger;
  const std::vector<int> loop{1, 2, 3, 4, 5};
  EXPECT_EQ(surprises(ledger, loop), 5);
  EXPECT_EQ(surprises(ledger, loop), 1);  // that it begins again
  for (int round = 0; round < 1000; ++round) {
    ASSERT_EQ(surprises(ledger, loop), 0);
  }
}

TEST(CallLedger, PredictsOneCallForEver) {
  CallLedger ledger;
  EXPECT_EQ(surprises(ledger, std::vector<int>(10'000, 7)), 2);
}

TEST(CallLedger, PredictsAnyLoopFromItsThirdRound) {
  Random random(3);
  for (int round = 0; round < kLedgerRounds; ++round) {
    // Few different calls: the present looks like many places of the past.
    std::vector<int> loop(1 + random.below(300));
    const auto kinds = 1 + random.below(4);
    for (int& c : loop) {
      c = static_cast<int>(random.below(kinds));
    }
    loop.push_back(99);  // once a round, as the end of a step is
    CallLedger ledger;
    surprises(ledger, loop);
    surprises(ledger, loop);
    surprises(ledger, {loop.begin(), loop.begin() + std::min<std::ptrdiff_t>(1, std::ssize(loop))});
    ASSERT_EQ(surprises(ledger, {loop.begin() + 1, loop.end()}), 0) << "loop of " << loop.size();
    ASSERT_EQ(surprises(ledger, loop), 0);
  }
}

TEST(CallLedger, OneMoreCallCostsFewSurprises) {
  CallLedger ledger;
  const std::vector<int> loop{1, 2, 2, 3, 2};
  for (int round = 0; round < 5; ++round) {
    surprises(ledger, loop);
  }
  EXPECT_EQ(surprises(ledger, {50}), 1);
  int after = 0;
  for (int round = 0; round < 50; ++round) {
    after += surprises(ledger, loop);
  }
  EXPECT_LE(after, 6);  // one of them where what it follows comes to the place of the 50
  for (int round = 0; round < 100; ++round) {
    EXPECT_EQ(surprises(ledger, loop), 0);
  }
}

// The claim of the header: whatever ranks do, those that start without asking make the same call.
TEST(CallLedger, RanksThatStartWithoutAskingMakeTheSameCall) {
  Random random(7);
  int differences = 0;
  for (int round = 0; round < kLedgerRounds; ++round) {
    std::vector<CallLedger> ranks(2 + random.below(7));
    const auto kinds = 2 + random.below(4);
    const auto period = 1 + random.below(12);
    std::vector<int> past;
    while (true) {
      // Mostly what the program did a period ago, sometimes anything.
      const int usual = past.size() < period || random.below(10) == 0 ? static_cast<int>(random.below(kinds))
                                                                      : past[past.size() - period];
      past.push_back(usual);
      std::vector<int> started;
      bool same = true;
      for (auto& rank : ranks) {
        const int own = random.below(100) == 0 ? static_cast<int>(random.below(kinds)) : usual;
        same = same && own == usual;
        if (rank.record(call(own))) {
          started.push_back(own);
        }
      }
      ASSERT_EQ(std::adjacent_find(started.begin(), started.end(), std::not_equal_to<>()), started.end());
      if (same) {  // all ask or none: nobody is waited for in vain
        ASSERT_TRUE(started.empty() || started.size() == ranks.size());
      } else {  // somebody asks, and so learns of it; there the group ends
        ASSERT_LT(started.size(), ranks.size());
        ++differences;
        break;
      }
    }
  }
  EXPECT_GE(differences, kLedgerRounds);
}

}  // namespace
}  // namespace torchext::core
