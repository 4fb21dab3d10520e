// GeneratorService and GeneratorClient hand every group to all its members, in one order, or end with one reason.
#include "ddp/averaging/generator_service.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "c10d/backend/process_group_prague.h"
#include "c10d/transport/message_tensor.h"
#include "ddp/averaging/generator_channel.h"
#include "ddp/averaging/generator_client.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using kit::errorOf;
using kit::has;
using kit::World;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kTags = 100;

core::GeneratorOptions generator(core::GeneratorKind kind, int workers, int group_size = 2) {
  return {.world_size = workers, .group_size = group_size, .kind = kind, .seed = 7};
}

// The service in rank 0's process, and a client of each rank, over the control network of a real group.
struct Worker {
  Worker(ProcessGroupPrague& group, const core::GeneratorOptions& options, milliseconds timeout,
         const GeneratorService::ErrorFunction& on_error)
      : service(group.getRank() == 0
                    ? std::make_shared<GeneratorService>(group.controlTransport(), kTags, options, on_error)
                    : nullptr),
        client(group.controlTransport(), kTags, service, timeout) {}

  std::shared_ptr<GeneratorService> service;  // rank 0's
  GeneratorClient client;
};

class GeneratorServiceTest : public kit::RanksTest {
 protected:
  // body(worker, group, rank). No service ends before all bodies are over.
  template <class Body>
  void onWorkers(const World& world, const core::GeneratorOptions& options, milliseconds timeout, const Body& body) {
    std::barrier<> over(world.size);
    onGroups<ProcessGroupPrague>(world, ProcessGroupPrague::Options(seconds(60)),
                                 [&](ProcessGroupPrague& group, int rank) {
                                   Worker worker(group, options, timeout, [this](const std::exception_ptr& error) {
                                     const std::lock_guard<std::mutex> lock(mutex_);
                                     service_errors_.push_back(errorOf([&] { std::rethrow_exception(error); }));
                                   });
                                   EXPECT_EQ(errorOf([&] { body(worker, group, rank); }), "") << "on rank " << rank;
                                   over.arrive_and_wait();
                                   if (worker.service) {
                                     worker.service->stop("the test is over");
                                     worker.service->stop("twice");
                                   }
                                 });
  }
  std::vector<std::string> serviceErrors() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return service_errors_;
  }

  std::mutex mutex_;  // guards what follows
  std::vector<std::string> service_errors_;
};

// Of one worker: the groups that it was handed, in order.
using Handed = std::vector<AssignedGroup>;

// Every group went to exactly its members, and each worker got its groups in the order in which they were made.
void expectConsistent(const std::vector<Handed>& handed) {
  std::map<std::uint64_t, std::set<int>> receivers;
  std::map<std::uint64_t, std::vector<int>> members;
  for (std::size_t worker = 0; worker < handed.size(); ++worker) {
    std::uint64_t last = 0;
    for (const AssignedGroup& group : handed[worker]) {
      EXPECT_GT(group.id, last) << "worker " << worker;
      last = group.id;
      receivers[group.id].insert(static_cast<int>(worker));
      EXPECT_EQ(members.try_emplace(group.id, group.members).first->second, group.members) << "group " << group.id;
    }
  }
  for (const auto& [id, who] : receivers) {
    EXPECT_EQ(std::vector<int>(who.begin(), who.end()), members[id]) << "group " << id;
  }
}

class EveryGeneratorTest : public GeneratorServiceTest, public ::testing::WithParamInterface<core::GeneratorKind> {};

TEST_P(EveryGeneratorTest, AGroupGoesToExactlyItsMembersInOneOrder) {
  constexpr int kRanks = 5;
  constexpr int kRounds = 60;
  const World world(kRanks);
  std::vector<Handed> handed(kRanks);
  onWorkers(world, generator(GetParam(), kRanks), seconds(30), [&](Worker& worker, ProcessGroupPrague&, int rank) {
    Handed& mine = handed[static_cast<std::size_t>(rank)];
    for (int round = 0; round < kRounds; ++round) {
      mine.push_back(worker.client.awaitGroup());
      worker.client.finished(mine.back().id);
    }
    worker.client.pauseAndDrain(WaitingFor::kEverybody, [&](const AssignedGroup& group) { mine.push_back(group); });
  });
  expectConsistent(handed);
  EXPECT_TRUE(serviceErrors().empty());
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryGeneratorTest,
                         ::testing::Values(core::GeneratorKind::kRandom, core::GeneratorKind::kDivision,
                                           core::GeneratorKind::kSmart),
                         [](const auto& param) { return std::string(core::toString(param.param)); });

TEST_F(GeneratorServiceTest, AGroupAskedForAheadIsTheNextOne) {
  constexpr int kRanks = 3;
  const World world(kRanks);
  std::vector<Handed> handed(kRanks);
  onWorkers(world, generator(core::GeneratorKind::kDivision, kRanks), seconds(30),
            [&](Worker& worker, ProcessGroupPrague&, int rank) {
              Handed& mine = handed[static_cast<std::size_t>(rank)];
              worker.client.ask();
              for (int round = 0; round < 20; ++round) {
                worker.client.ask();  // once more: idempotent
                mine.push_back(worker.client.awaitGroup());
                if (round < 19) {
                  worker.client.ask();  // while the group runs: goes out with finished()
                }
                worker.client.finished(mine.back().id);
              }
              worker.client.pauseAndDrain(WaitingFor::kEverybody,
                                          [&](const AssignedGroup& group) { mine.push_back(group); });
            });
  expectConsistent(handed);
}

TEST_F(GeneratorServiceTest, APeerThatNeverAsksEndsTheWaitAtItsTimeout) {
  const World world(2);
  onWorkers(world, generator(core::GeneratorKind::kReadySet, 2), milliseconds(100),
            [](Worker& worker, ProcessGroupPrague&, int rank) {
              if (rank == 0) {
                const std::string error = errorOf([&] { worker.client.awaitGroup(); });
                EXPECT_TRUE(has(error, "no group from the generator within 100 ms")) << error;
              }
            });
}

TEST_F(GeneratorServiceTest, StopEndsALocalWaitWithTheFirstReason) {
  const World world(2);
  onWorkers(world, generator(core::GeneratorKind::kReadySet, 2), seconds(30),
            [](Worker& worker, ProcessGroupPrague&, int rank) {
              if (rank == 0) {
                worker.client.ask();
                worker.service->stop("somebody left");
                worker.service->stop("later");
                EXPECT_TRUE(has(errorOf([&] { worker.client.awaitGroup(); }), "somebody left"));
              }
            });
}

TEST_F(GeneratorServiceTest, AMalformedRequestNamesItsSenderAndEndsTheService) {
  const World world(2);
  onWorkers(world, generator(core::GeneratorKind::kReadySet, 2), seconds(30),
            [](Worker& worker, ProcessGroupPrague& group, int rank) {
              if (rank == 1) {
                const at::Tensor bytes = emptyMessage(sizeof(core::GeneratorMessage));
                bytes.fill_(0x5a);
                group.controlTransport().send(bytes, 0, kTags + kGeneratorRequestTag)->wait();
                return;
              }
              const std::string error = errorOf([&] { worker.client.awaitGroup(); });
              EXPECT_TRUE(has(error, "the group generator")) << error;
              EXPECT_TRUE(has(error, "rank 1")) << error;
            });
  ASSERT_EQ(serviceErrors().size(), 1U);
  EXPECT_TRUE(has(serviceErrors()[0], "the group generator")) << serviceErrors()[0];
}

TEST_F(GeneratorServiceTest, ACompletionOfNoGroupEndsTheService) {
  const World world(2);
  onWorkers(world, generator(core::GeneratorKind::kReadySet, 2), seconds(30),
            [](Worker& worker, ProcessGroupPrague&, int rank) {
              if (rank == 1) {
                worker.client.finished(99);
              } else {
                EXPECT_NE(errorOf([&] { worker.client.awaitGroup(); }), "");
              }
            });
  EXPECT_EQ(serviceErrors().size(), 1U);
}

TEST_F(GeneratorServiceTest, ADeadServiceEndsItsClients) {
  const World world(3);
  std::barrier<> asked(3);
  onGroups<ProcessGroupPrague>(world, ProcessGroupPrague::Options(seconds(60)),
                               [&](ProcessGroupPrague& group, int rank) {
                                 Worker worker(group, generator(core::GeneratorKind::kReadySet, 3, 3), seconds(30),
                                               [](const std::exception_ptr&) {});
                                 if (rank > 0) {
                                   worker.client.ask();
                                 }
                                 asked.arrive_and_wait();
                                 if (rank == 0) {
                                   world.kill(0);
                                 } else {
                                   const std::string error = errorOf([&] { worker.client.awaitGroup(); });
                                   EXPECT_TRUE(has(error, "rank 0")) << error;
                                 }
                               });
}

}  // namespace
}  // namespace torchext
