// CallCheck finds ranks that make different collectives, and says on every rank which two calls differ.
#include "c10d/fault/call_check.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstring>
#include <deque>
#include <random>

#include <ATen/ATen.h>

#include "c10d/fault/call_site.h"
#include "c10d/fault/collective_header.h"
#include "c10d/fault/fault_points.h"
#include "c10d/fault/orderly_exit_scope.h"
#include "kit/ranks_as_threads.h"

namespace torchext {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using kit::errorOf;
using kit::has;
using kit::World;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Works = c10::intrusive_ptr<c10d::Work>;

constexpr int kCheckedRanks = 3;

// The tensors of one rank's call, and what they held before.
class Buffers {
 public:
  explicit Buffers(int rank) : rank_(rank) {}
  at::Tensor make(at::IntArrayRef sizes, c10::ScalarType dtype = at::kFloat) {
    all_.push_back(at::full(sizes, rank_ + 1, dtype));
    before_.push_back(all_.back().clone());
    return all_.back();
  }
  std::vector<at::Tensor> list(std::size_t count, at::IntArrayRef sizes) {
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < count; ++i) {
      tensors.push_back(make(sizes));
    }
    return tensors;
  }
  bool untouched() const {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (!at::equal(all_[i], before_[i])) {
        return false;
      }
    }
    return true;
  }

 private:
  int rank_;
  std::vector<at::Tensor> all_;
  std::vector<at::Tensor> before_;
};

using Call = std::function<Works(DelegatingBackend& group, Buffers& buffers)>;

Call allReduce(std::vector<std::int64_t> sizes, c10::ScalarType dtype = at::kFloat,
               ReduceOp::RedOpType op = ReduceOp::SUM) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> tensors{buffers.make(sizes, dtype)};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return group.allreduce(tensors, options);
  };
}

Call allReduceCoalesced(std::int64_t first, std::int64_t second) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> tensors{buffers.make({first}), buffers.make({second})};
    return group.allreduce_coalesced(tensors, {});
  };
}

Call allReduceSparse(std::int64_t numel) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> tensors{buffers.make({numel})};
    return group.allreduce_sparse(tensors, {});
  };
}

Call broadcast(int root, std::int64_t numel = 10) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> tensors{buffers.make({numel})};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return group.broadcast(tensors, options);
  };
}

Call reduceTo(int root) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> tensors{buffers.make({10})};
    c10d::ReduceOptions options;
    options.rootRank = root;
    return group.reduce(tensors, options);
  };
}

Call allGather(std::int64_t numel) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> inputs{buffers.make({numel})};
    std::vector<std::vector<at::Tensor>> outputs{buffers.list(kCheckedRanks, {numel})};
    return group.allgather(outputs, inputs, {});
  };
}

Call allGatherSingle(std::int64_t numel) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    at::Tensor input = buffers.make({numel});
    at::Tensor output = buffers.make({numel * kCheckedRanks});
    return group._allgather_base(output, input, {});
  };
}

Call allGatherCoalesced(std::int64_t numel) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> inputs{buffers.make({numel})};
    std::vector<std::vector<at::Tensor>> outputs{buffers.list(kCheckedRanks, {numel})};
    return group.allgather_coalesced(outputs, inputs, {});
  };
}

Call gatherTo(int root) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> inputs{buffers.make({10})};
    std::vector<std::vector<at::Tensor>> outputs;
    c10d::GatherOptions options;
    options.rootRank = root;
    return group.gather(outputs, inputs, options);
  };
}

Call scatterFrom(int root) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> outputs{buffers.make({10})};
    std::vector<std::vector<at::Tensor>> inputs;
    c10d::ScatterOptions options;
    options.rootRank = root;
    return group.scatter(outputs, inputs, options);
  };
}

Call reduceScatter(ReduceOp::RedOpType op) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    std::vector<at::Tensor> outputs{buffers.make({4})};
    std::vector<std::vector<at::Tensor>> inputs{buffers.list(kCheckedRanks, {4})};
    c10d::ReduceScatterOptions options;
    options.reduceOp = op;
    return group.reduce_scatter(outputs, inputs, options);
  };
}

Call reduceScatterSingle(std::int64_t numel) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    at::Tensor output = buffers.make({numel});
    at::Tensor input = buffers.make({numel * kCheckedRanks});
    return group._reduce_scatter_base(output, input, {});
  };
}

Call allToAllSingle(c10::ScalarType dtype, std::int64_t numel = 6) {
  return [=](DelegatingBackend& group, Buffers& buffers) {
    at::Tensor output = buffers.make({numel}, dtype);
    at::Tensor input = buffers.make({numel}, dtype);
    std::vector<std::int64_t> splits;
    return group.alltoall_base(output, input, splits, splits, {});
  };
}

Call allToAll() {
  return [](DelegatingBackend& group, Buffers& buffers) {
    auto outputs = buffers.list(kCheckedRanks, {2});
    auto inputs = buffers.list(kCheckedRanks, {2});
    return group.alltoall(outputs, inputs, {});
  };
}

Call barrier() {
  return [](DelegatingBackend& group, Buffers& /*buffers*/) { return group.barrier({}); };
}

struct Row {
  const char* name;
  Call common;  // of rank 0 and 2
  Call odd;     // of rank 1
  std::string common_text;
  std::string odd_text;
};

// The common call is one that the fake network carries.
std::vector<Row> repeatableRows() {
  return {
      {"operation", allReduce({10}), broadcast(0), "all_reduce(sum, float32, 10 elements)",
       "broadcast(float32, 10 elements, root 0)"},
      {"dtype", allReduce({10}), allReduce({10}, at::kDouble), "all_reduce(sum, float32, 10 elements)",
       "all_reduce(sum, float64, 10 elements)"},
      {"dtype of one width", allReduce({10}), allReduce({10}, at::kInt), "float32, 10 elements", "int32, 10 elements"},
      {"size", allReduce({10}), allReduce({12}), "10 elements)", "12 elements)"},
      {"an empty tensor", allReduce({1}), allReduce({0}), "1 element)", "0 elements)"},
      {"shape", allReduce({2, 5}), allReduce({5, 2}), "10 elements) of one shape", "10 elements) of another"},
      {"reduction", allReduce({10}), allReduce({10}, at::kFloat, ReduceOp::MAX), "all_reduce(sum, ",
       "all_reduce(max, "},
      {"root of broadcast", broadcast(0), broadcast(2), "root 0)", "root 2)"},
      {"size of broadcast", broadcast(0), broadcast(0, 11), "10 elements, root 0)", "11 elements, root 0)"},
      {"all_gather", allGather(4), allGather(5), "all_gather(float32, 4 elements)", "5 elements)"},
      {"all_gather_single", allGatherSingle(4), allGatherSingle(5), "all_gather_single(float32, 4 elements)",
       "5 elements)"},
      {"barrier", allReduce({10}), barrier(), "all_reduce(sum, float32, 10 elements)", "barrier()"},
  };
}

std::vector<Row> rows() {
  std::vector<Row> all = repeatableRows();
  const std::vector<Row> others{
      {"root of reduce", reduceTo(0), reduceTo(1), "reduce(sum, float32, 10 elements, root 0)", "root 1)"},
      {"root of gather", gatherTo(0), gatherTo(1), "gather(float32, 10 elements, root 0)", "root 1)"},
      {"root of scatter", scatterFrom(0), scatterFrom(1), "scatter(float32, 10 elements, root 0)", "root 1)"},
      {"all_gather_coalesced", allGatherCoalesced(4), allGatherCoalesced(5),
       "all_gather_coalesced(float32, 4 elements)", "5 elements)"},
      {"reduction of reduce_scatter", reduceScatter(ReduceOp::SUM), reduceScatter(ReduceOp::MIN),
       "reduce_scatter(sum, float32, 12 elements)", "reduce_scatter(min, "},
      {"reduce_scatter_single", reduceScatterSingle(4), reduceScatterSingle(5),
       "reduce_scatter_single(sum, float32, 12 elements)", "15 elements)"},
      {"dtype of all_to_all_single", allToAllSingle(at::kFloat), allToAllSingle(at::kDouble),
       "all_to_all_single(float32)", "all_to_all_single(float64)"},
      {"all_to_all and its single", allToAll(), allToAllSingle(at::kFloat), "all_to_all()",
       "all_to_all_single(float32)"},
      {"order in a list", allReduceCoalesced(3, 4), allReduceCoalesced(4, 3), "7 elements) of one shape",
       "7 elements) of another"},
      {"coalesced", allReduce({7}), allReduceCoalesced(3, 4), "all_reduce(sum, float32, 7 elements)",
       "all_reduce_coalesced(sum, float32, 7 elements)"},
      {"sparse", allReduceSparse(7), allReduceSparse(8), "all_reduce_sparse(sum, float32, 7 elements)", "8 elements)"},
  };
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

GroupOptions checkedOptions(const std::string& check, milliseconds timeout = seconds(60)) {
  GroupOptions options("prague", timeout);
  options.call_check = check;
  options.heartbeat_timeout = milliseconds(0);
  return options;
}

class CallCheckTest : public kit::RanksTest {
 protected:
  // body(group, rank) on each of kCheckedRanks in each of several worlds at a time.
  void inWorlds(const std::vector<std::unique_ptr<World>>& worlds, const GroupOptions& options,
                const std::function<void(std::size_t world, DelegatingBackend& group, int rank)>& body) {
    std::deque<std::barrier<>> over;
    for (std::size_t world = 0; world < worlds.size(); ++world) {
      over.emplace_back(kCheckedRanks);
    }
    onRanks(static_cast<int>(worlds.size()) * kCheckedRanks, [&](int thread) {
      const auto world = static_cast<std::size_t>(thread / kCheckedRanks);
      runRank(
          over[world], [&](int rank) { return plainGroup(*worlds[world], rank, options); },
          [&](DelegatingBackend& group, int rank) { body(world, group, rank); }, thread % kCheckedRanks);
    });
  }
  static std::vector<std::unique_ptr<World>> worlds(std::size_t count) {
    std::vector<std::unique_ptr<World>> made;
    for (std::size_t i = 0; i < count; ++i) {
      made.push_back(std::make_unique<World>(kCheckedRanks));
    }
    return made;
  }
  void differences(const std::vector<Row>& all, const std::string& check, int before);
  void endsAtAnyMessage(milliseconds heartbeat, void (World::*end)(int) const, const std::string& reason);
  void faultyCall(const std::string& point, bool untouched);
};

// before: how often all have made the common call.
void CallCheckTest::differences(const std::vector<Row>& all, const std::string& check, int before) {
  constexpr std::size_t kAtOnce = 8;
  const std::string number = c10::str("#", before + 1, ": ");
  for (std::size_t begin = 0; begin < all.size(); begin += kAtOnce) {
    const auto made = worlds(std::min(kAtOnce, all.size() - begin));
    inWorlds(made, checkedOptions(check), [&](std::size_t world, DelegatingBackend& group, int rank) {
      const Row& row = all[begin + world];
      Buffers buffers(rank);
      for (int call = 0; call < before; ++call) {
        Buffers earlier(rank);
        row.common(group, earlier)->wait();
      }
      const std::string error = errorOf([&] { (rank == 1 ? row.odd : row.common)(group, buffers)->wait(); });
      EXPECT_TRUE(has(error, "make different calls " + number)) << row.name << ": " << error;
      EXPECT_TRUE(has(error, "ranks 0 and 1 ") || has(error, "ranks 1 and 2 ")) << row.name << ": " << error;
      EXPECT_TRUE(has(error, row.common_text)) << row.name << ": " << error;
      EXPECT_TRUE(has(error, row.odd_text)) << row.name << ": " << error;
      // The lower rank's call stands first. Of one shape is that of who noticed.
      const auto mine = error.find(row.common_text, error.find("different calls"));
      const auto its = error.rfind(row.odd_text);
      EXPECT_TRUE(has(row.odd_text, "of another") || has(error, "ranks 0 and 1 ") == (mine < its))
          << row.name << ": " << error;
      EXPECT_TRUE(buffers.untouched()) << row.name << ", rank " << rank;
      EXPECT_NE(errorOf([&] { group.health()->checkUsable("a later call"); }), "");
    });
    for (const auto& world : made) {
      EXPECT_EQ(world->data->mixedCalls(), 0);
    }
  }
}

TEST_F(CallCheckTest, NamesBothCallsOfEveryRow) { differences(rows(), "new", 0); }
TEST_F(CallCheckTest, NamesBothCallsWhereOneWasPredicted) { differences(repeatableRows(), "new", 4); }
TEST_F(CallCheckTest, NamesBothCallsWhenEveryCallIsChecked) { differences(repeatableRows(), "every", 4); }

// What need not be equal: dimensions of one, and sizes that may differ from pair to pair.
TEST_F(CallCheckTest, HeadersHoldWhatMustBeEqual) {
  const auto reduced = [](at::IntArrayRef sizes) {
    return headerOf(OpType::ALLREDUCE, {at::zeros(sizes)}, c10d::ReduceOp(ReduceOp::SUM));
  };
  EXPECT_EQ(reduced({2, 5}), reduced({2, 1, 5, 1}));
  EXPECT_NE(reduced({2, 5}), reduced({5, 2}));
  EXPECT_NE(reduced({2, 5}), reduced({10}));
  EXPECT_EQ(headerOf(OpType::BROADCAST, {at::zeros({2, 5})}, 1), headerOf(OpType::BROADCAST, {at::zeros({10})}, 1));
  EXPECT_NE(headerOf(OpType::BROADCAST, {at::zeros({10})}, 1), headerOf(OpType::BROADCAST, {at::zeros({10})}, 2));
  EXPECT_EQ(headerOfDtype(OpType::ALLTOALL_BASE, at::zeros({4})), headerOfDtype(OpType::ALLTOALL_BASE, at::zeros({9})));
  const at::Tensor single = at::zeros({4});
  const at::Tensor wide = at::zeros({4}, at::kDouble);
  const at::Tensor whole = at::zeros({4}, at::kLong);
  EXPECT_NE(headerOf(OpType::ALLGATHER, {single, wide}), headerOf(OpType::ALLGATHER, {single, whole}));
  EXPECT_TRUE(isOrderlyExit(headerOfOrderlyExit()));
  EXPECT_FALSE(isOrderlyExit(headerOf(OpType::BARRIER)));
  EXPECT_NE(headerOfOrderlyExit(), headerOf(OpType::BARRIER));
  EXPECT_EQ(describe(headerOf(OpType::BARRIER)), "barrier()");
  EXPECT_EQ(describe(headerOf(OpType::BROADCAST, {at::zeros({1})}, 3)), "broadcast(float32, 1 element, root 3)");
}

// A loop is predicted: its calls send no message of the check, and are exact all the same.
TEST_F(CallCheckTest, PredictedCallsSendNoMessage) {
  for (const std::string check : {"new", "every"}) {
    const World world(kCheckedRanks);
    std::array<int, kCheckedRanks> sent{};
    std::barrier<> sync_point(kCheckedRanks);
    onPlainGroups(world, checkedOptions(check), [&](DelegatingBackend& group, int rank) {
      const auto loop = [&](int rounds) {
        for (int round = 0; round < rounds; ++round) {
          for (const std::int64_t numel : {3, 5}) {
            std::vector<at::Tensor> tensors{at::full({numel}, rank + 1.0)};
            group.allreduce(tensors, {})->wait();
            EXPECT_TRUE(at::equal(tensors[0], at::full({numel}, 6.0)));
          }
        }
      };
      loop(4);
      sync_point.arrive_and_wait();
      sent.at(static_cast<std::size_t>(rank)) = world.control->sends(rank);
      sync_point.arrive_and_wait();
      loop(25);
      sync_point.arrive_and_wait();
      const int more = world.control->sends(rank) - sent.at(static_cast<std::size_t>(rank));
      // Headers of the calls before go out on a thread of their own, and may be late.
      EXPECT_TRUE(check == "every" ? more >= 100 : more < 10) << more << " messages of 50 calls in mode " << check;
      sync_point.arrive_and_wait();
    });
    EXPECT_EQ(world.data->mixedCalls(), 0);
  }
}

// Random programs, in which one rank makes one call another: found on all ranks, and data of different calls never
// meets, whatever was predicted.
TEST_F(CallCheckTest, FindsADeviationAnywhereInARandomProgram) {
  constexpr std::size_t kPrograms = 8;
  for (const std::string check : {"new", "every"}) {
    const auto made = worlds(kPrograms);
    inWorlds(made, checkedOptions(check), [&](std::size_t program, DelegatingBackend& group, int rank) {
      std::mt19937_64 random(program * 77 + 5);  // the same on all ranks
      const std::size_t length = 1 + random() % 4;
      const int odd = static_cast<int>(random() % kCheckedRanks);
      const std::size_t deviation = random() % (6 * length);
      const bool leaves_out = length > 1 && random() % 2 == 0;  // a call, instead of making another
      std::string error;
      for (std::size_t call = 0; call <= deviation + 3 && error.empty(); ++call) {
        const bool differs = call >= deviation && rank == odd;
        const std::size_t place = (call + (differs && leaves_out ? 1 : 0)) % length;
        const auto numel = static_cast<std::int64_t>(place + 1 + (differs && !leaves_out ? 4 : 0));
        std::vector<at::Tensor> tensors{at::full({numel}, 1.0)};
        error = errorOf([&] { group.allreduce(tensors, {})->wait(); });
        if (call < deviation) {
          EXPECT_TRUE(at::equal(tensors[0], at::full_like(tensors[0], 3.0))) << "program " << program;
        }
      }
      EXPECT_TRUE(has(error, c10::str("make different calls #", deviation + 1, ": "))) << program << ": " << error;
    });
    for (const auto& world : made) {
      EXPECT_EQ(world->data->mixedCalls(), 0);
    }
  }
}

// What the check is for: without it Gloo takes the one for the other.
TEST_F(CallCheckTest, WithoutItCallsMix) {
  const World world(kCheckedRanks);
  onPlainGroups(world, checkedOptions("off"), [&](DelegatingBackend& group, int rank) {
    Buffers buffers(rank);
    EXPECT_NE(errorOf([&] { (rank == 1 ? allReduce({6}) : allReduce({5}))(group, buffers)->wait(); }), "");
  });
  EXPECT_EQ(world.data->mixedCalls(), 1);
}

// Two calls whose headers are alike, exchanged on one rank: only the lines of the script tell.
thread_local const char* current_line = "";

TEST_F(CallCheckTest, ComparesLines) {
  setLineFinder([] { return core::makeCallLine(current_line); });
  const World world(kCheckedRanks);
  onPlainGroups(world, checkedOptions("lines"), [&](DelegatingBackend& group, int rank) {
    Buffers buffers(rank);
    current_line = "train.py:3";
    allReduce({5})(group, buffers)->wait();
    current_line = rank == 1 ? "train.py:5" : "train.py:4";
    const std::string error = errorOf([&] { allReduce({5})(group, buffers)->wait(); });
    EXPECT_TRUE(has(error, "different calls #2")) << error;
    EXPECT_TRUE(has(error, "all_reduce(sum, float32, 5 elements) at train.py:4")) << error;
    EXPECT_TRUE(has(error, "all_reduce(sum, float32, 5 elements) at train.py:5")) << error;
  });
  setLineFinder(nullptr);
}

// The barrier of a rank that leaves is no other's.
TEST_F(CallCheckTest, NamesARankThatLeaves) {
  const auto made = worlds(2);
  inWorlds(made, checkedOptions("new"), [&](std::size_t world, DelegatingBackend& group, int rank) {
    Buffers buffers(rank);
    const std::string error = errorOf([&] {
      if (rank == 1) {
        const OrderlyExitScope orderly_exit;
        group.barrier({})->wait();
      } else {
        (world == 0 ? barrier() : allReduce({4}))(group, buffers)->wait();
      }
    });
    EXPECT_TRUE(has(error, "rank 1 left, by destroy_process_group() or the end of its script, when rank ")) << error;
    EXPECT_TRUE(has(error, world == 0 ? "called barrier() #1" : "called all_reduce(sum, float32, 4 elements) #1"))
        << error;
    EXPECT_TRUE(buffers.untouched());
  });
}

// Rank 2 does not come: to a call that is new, and to one that has started.
TEST_F(CallCheckTest, NamesWhoHasNotCalled) {
  for (const bool started : {false, true}) {
    const World world(kCheckedRanks);
    GroupOptions options = checkedOptions("new", started ? milliseconds(60'000) : milliseconds(600));
    options.operation_timeout = milliseconds(started ? 600 : 0);
    options.heartbeat_timeout = milliseconds(3000);
    std::barrier<> end(kCheckedRanks);
    onPlainGroups(world, options, [&](DelegatingBackend& group, int rank) {
      Buffers buffers(rank);
      for (int round = 0; started && round < 5; ++round) {
        allReduce({4})(group, buffers)->wait();
      }
      if (rank != 2) {
        const std::string error = errorOf([&] { allReduce({4})(group, buffers)->wait(); });
        EXPECT_TRUE(has(error, c10::str("rank 2 has not called all_reduce #", started ? 6 : 1, ", its last call is ",
                                        started ? "all_reduce #5, " : "no collective")))
            << error;
      }
      end.arrive_and_wait();
    });
  }
}

// Calls of new shapes are made before their elders have started, beside messages that the peers wait for.
TEST_F(CallCheckTest, CallsStartInTheirOrder) {
  for (const int size : {2, 3, 8}) {
    const World world(size);
    onPlainGroups(world, checkedOptions("new"), [&](DelegatingBackend& group, int rank) {
      std::vector<at::Tensor> first{at::full({3}, rank + 1.0)};
      std::vector<at::Tensor> message{at::full({1}, 5.0)};
      if (rank == 0) {
        const Works work = group.allreduce(first, {});
        group.send(message, 1, 0)->wait();
        work->wait();
      } else {
        if (rank == 1) {
          group.recv(message, 0, 0)->wait();
        }
        group.allreduce(first, {})->wait();
      }
      std::vector<at::Tensor> tensors;
      std::vector<Works> works;
      for (int call = 0; call < 60; ++call) {
        std::vector<at::Tensor> one{at::full({1 + call % 7}, rank + call, call % 2 == 0 ? at::kFloat : at::kDouble)};
        tensors.push_back(one[0]);
        works.push_back(group.allreduce(one, {}));
      }
      for (int call = 59; call >= 0; --call) {
        const auto at = static_cast<std::size_t>(call);
        if (call % 3 == 0) {
          works[at]->getFuture()->waitAndThrow();
        }
        works[at]->wait();
        EXPECT_TRUE(works[at]->isSuccess());
        const int sum = size * (size - 1) / 2 + size * call;
        EXPECT_TRUE(at::equal(tensors[at], at::full_like(tensors[at], sum))) << "call " << call;
      }
    });
    EXPECT_EQ(world.data->mixedCalls(), 0);
  }
}

// What the inner backend refuses is an error of the call, and the group goes on.
// Callbacks of futures call from threads of their own, whose order among each other no rank knows.
TEST_F(CallCheckTest, EqualCallsOfSeveralThreadsAgree) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 100;
  const World world(2);
  onPlainGroups(world, checkedOptions("every"), [&](DelegatingBackend& group, int rank) {
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        const std::string error = errorOf([&] {
          for (int call = 0; call < kCalls; ++call) {
            Buffers buffers(rank);
            allReduce({50})(group, buffers)->wait();
          }
        });
        EXPECT_EQ(error, "");
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

TEST_F(CallCheckTest, AnInvalidCallFailsByItself) {
  const World world(kCheckedRanks);
  onPlainGroups(world, checkedOptions("new"), [&](DelegatingBackend& group, int rank) {
    Buffers buffers(rank);
    for (int round = 0; round < 5; ++round) {  // started later, and at once
      const std::string error = errorOf([&] { allReduce({2}, at::kFloat, ReduceOp::BAND)(group, buffers)->wait(); });
      EXPECT_TRUE(has(error, "floats have no bits")) << error;
    }
    EXPECT_FALSE(group.health()->failed());
    std::vector<at::Tensor> tensors{at::full({2}, 1.0)};
    group.allreduce(tensors, {})->wait();
    EXPECT_TRUE(at::equal(tensors[0], at::full({2}, 3.0)));
  });
}

// One that never calls lets another go so far ahead, and no further.
TEST_F(CallCheckTest, ARankThatIsFarAheadWaits) {
  constexpr int kCalls = 1100;
  const World world(2);
  std::atomic<int> made{0};
  onPlainGroups(world, checkedOptions("new"), [&](DelegatingBackend& group, int rank) {
    if (rank == 1) {
      EXPECT_TRUE(kit::soon([&] { return made >= 1024; }));
      std::this_thread::sleep_for(milliseconds(50));
      EXPECT_EQ(made, 1024);
    }
    std::vector<Works> works;
    std::vector<at::Tensor> tensors;
    for (int call = 0; call < kCalls; ++call) {
      std::vector<at::Tensor> one{at::full({1}, rank + 1.0)};
      tensors.push_back(one[0]);
      works.push_back(group.allreduce(one, {}));
      if (rank == 0) {
        ++made;
      }
    }
    for (const auto& work : works) {
      work->wait();
    }
    EXPECT_TRUE(at::equal(at::cat(tensors), at::full({kCalls}, 3.0)));
  });
}

// Rank 1 sends what no torchext sends in place of a header: the group ends on all ranks, with its name.
TEST_F(CallCheckTest, RefusesMalformedHeaders) {
  for (const std::int64_t bytes : {5, 24}) {
    const World world(kCheckedRanks);
    onPlainGroups(world, checkedOptions("new"), [&](DelegatingBackend& group, int rank) {
      Buffers buffers(rank);
      const std::string error = errorOf([&] {
        if (rank == 1) {
          std::vector<at::Tensor> junk{at::full({bytes}, bytes == 5 ? 0xff : 0, at::kByte)};
          group.control()->send(junk, 2, FailureMonitor::kReservedTags + 2)->wait();
          std::vector<at::Tensor> tensors{at::ones({1})};
          group.recv(tensors, 0, 0)->wait();
        } else {
          allReduce({4})(group, buffers)->wait();
        }
      });
      EXPECT_TRUE(has(error, "rank 1 sent a malformed message: malformed ")) << error;
      EXPECT_EQ(group.health()->reason().get().rank, 1);
      EXPECT_TRUE(buffers.untouched());
    });
  }
}

// Rank 1 dies, or falls silent, at its n-th message to the others, for every n of two calls: all survivors name it.
void CallCheckTest::endsAtAnyMessage(milliseconds heartbeat, void (World::*end)(int) const, const std::string& reason) {
  constexpr std::size_t kMessages = 6;
  const auto made = worlds(kMessages);
  GroupOptions options = checkedOptions("new");
  options.heartbeat_timeout = heartbeat;
  inWorlds(made, options, [&](std::size_t index, DelegatingBackend& group, int rank) {
    const World& world = *made[index];
    if (rank == 1) {
      // Nobody is watched before its first heartbeat.
      EXPECT_TRUE(heartbeat.count() == 0 || kit::soon([&] { return world.control->sends(1) >= 3; }));
      world.control->afterSends(1, static_cast<int>(index) + 1, [&world, end] { (world.*end)(1); });
    }
    std::string error;
    for (std::int64_t call = 1; call < 1000 && error.empty(); ++call) {  // none of them is predicted
      std::vector<at::Tensor> tensors{at::ones({call})};
      error = errorOf([&] { group.allreduce(tensors, {})->wait(); });
      EXPECT_TRUE(!error.empty() || at::equal(tensors[0], at::full({call}, 3.0)));
    }
    if (rank != 1) {
      EXPECT_TRUE(has(error, reason)) << "message " << index + 1 << ": " << error;
      EXPECT_EQ(group.health()->reason().get().rank, 1);
    }
  });
}

TEST_F(CallCheckTest, NamesARankThatDiesAtAnyMessage) {
  endsAtAnyMessage(milliseconds(0), &World::kill, "rank 1 died (connection closed)");
}

TEST_F(CallCheckTest, NamesARankThatFallsSilentAtAnyMessage) {
  endsAtAnyMessage(milliseconds(kit::kSanitized ? 2000 : 600), &World::freeze, "rank 1 has been silent for ");
}

// Whoever passes first fails; all ranks name it.
void CallCheckTest::faultyCall(const std::string& point, bool untouched) {
  const World world(kCheckedRanks);
  std::array<int, kCheckedRanks> faulty{};
  armFaultPoint(point, "throw", 0);
  onPlainGroups(world, checkedOptions("new"), [&](DelegatingBackend& group, int rank) {
    Buffers buffers(rank);
    const std::string error = errorOf([&] { allReduce({4})(group, buffers)->wait(); });
    EXPECT_TRUE(!untouched || buffers.untouched());
    faulty.at(static_cast<std::size_t>(rank)) = group.health()->reason().get().rank;
    EXPECT_TRUE(has(
        error, c10::str("rank ", group.health()->reason().get().rank, " failed in all_reduce #1: fault point ", point)))
        << error;
  });
  EXPECT_GE(faulty[0], 0);
  EXPECT_TRUE(faulty[0] == faulty[1] && faulty[1] == faulty[2]);
}

TEST_F(CallCheckTest, NamesARankThatFailsWhenItHasAsked) { faultyCall("call.asked", true); }
// Others have agreed by then, and may have started: they end all the same.
TEST_F(CallCheckTest, NamesARankThatFailsWhenAllHaveAgreed) { faultyCall("call.agreed", false); }

// The inner backend has the call, so the others get their result.
TEST_F(CallCheckTest, AFaultBehindTheStartIsItsRanksOwn) {
  const World world(kCheckedRanks);
  std::atomic<int> failed{0};
  armFaultPoint("call.started", "throw", 0);
  onPlainGroups(world, checkedOptions("new"), [&](DelegatingBackend& group, int rank) {
    std::vector<at::Tensor> tensors{at::full({4}, rank + 1.0)};
    const std::string error = errorOf([&] { group.allreduce(tensors, {})->wait(); });
    if (error.empty()) {
      EXPECT_TRUE(at::equal(tensors[0], at::full({4}, 6.0)));
    } else {
      ++failed;
      EXPECT_TRUE(has(error, "fault point call.started")) << error;
    }
  });
  EXPECT_EQ(failed, 1);
}

}  // namespace
}  // namespace torchext
