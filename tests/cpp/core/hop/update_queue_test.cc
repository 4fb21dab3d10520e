#include "core/hop/update_queue.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <stdexcept>

#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

UpdateQueueOptions threeSenders(int max_ahead, int backup_workers, int staleness) {
  return {.senders = {2, 5, 7},
          .weights = {0.5, 0.25, 0.25},
          .max_ahead = max_ahead,
          .backup_workers = backup_workers,
          .staleness = staleness};
}

void put(UpdateQueue& queue, int sender, std::int64_t tag) {
  ASSERT_EQ(queue.admit(sender, tag), Admission::kStore);
  queue.enqueue(sender, tag);
}

TEST(UpdateQueue, SlotsRotateAndDoNotOverlap) {
  const UpdateQueue queue(threeSenders(2, 0, 0));
  EXPECT_EQ(queue.capacity(), 9);
  std::set<int> slots;
  for (const int sender : {2, 5, 7}) {
    for (std::int64_t tag = 10; tag < 13; ++tag) {
      slots.insert(queue.slotOf(sender, tag));
      EXPECT_EQ(queue.slotOf(sender, tag), queue.slotOf(sender, tag + 3));
    }
  }
  EXPECT_EQ(slots.size(), 9U);
  EXPECT_EQ(*slots.begin(), 0);
  EXPECT_EQ(*slots.rbegin(), 8);
}

TEST(UpdateQueue, NobodyWaitsForASenderThatHasLeft) {
  UpdateQueue queue(threeSenders(2, 0, 0));
  put(queue, 7, 0);
  put(queue, 7, 1);
  queue.leave(7);
  queue.leave(7);
  EXPECT_EQ(queue.required(), 3);  // of this iteration its model is there
  put(queue, 2, 0);
  put(queue, 5, 0);
  EXPECT_EQ(queue.dequeue().size(), 3U);
  queue.release();
  EXPECT_EQ(queue.required(), 2);
  queue.advance(1);
  EXPECT_EQ(queue.required(), 3);
  queue.advance(2);
  EXPECT_EQ(queue.required(), 2);
  put(queue, 2, 2);
  EXPECT_FALSE(queue.ready());
  put(queue, 5, 2);
  const auto taken = queue.dequeue();
  ASSERT_EQ(taken.size(), 2U);
  EXPECT_DOUBLE_EQ(taken[0].weight, 0.5 / 0.75);
  EXPECT_DOUBLE_EQ(taken[1].weight, 0.25 / 0.75);
  queue.release();
  ASSERT_EQ(queue.admit(5, 3), Admission::kStore);
  EXPECT_THROW_MESSAGE(queue.leave(5), std::logic_error, "while its tag 3 is arriving");
  EXPECT_THROW(queue.leave(3), std::out_of_range);
}

TEST(UpdateQueue, BackupAndStalenessWithSendersThatHaveLeft) {
  UpdateQueue backup(threeSenders(1, 2, 0));
  backup.leave(5);
  backup.leave(7);
  EXPECT_EQ(backup.required(), 1);  // never less: the own model
  EXPECT_FALSE(backup.ready());
  put(backup, 2, 0);
  EXPECT_EQ(backup.dequeue().size(), 1U);

  UpdateQueue stale(threeSenders(4, 0, 2));
  put(stale, 7, 0);
  stale.leave(7);
  stale.advance(2);
  put(stale, 2, 2);
  put(stale, 5, 2);
  EXPECT_EQ(stale.dequeue().size(), 3U);  // two iterations old
  stale.release();
  stale.advance(3);
  EXPECT_EQ(stale.required(), 2);
  EXPECT_EQ(stale.dequeue().size(), 2U);
}

TEST(UpdateQueue, StandardTakesTheTagOfAll) {
  UpdateQueue queue(threeSenders(1, 0, 0));
  put(queue, 2, 0);
  put(queue, 5, 0);
  put(queue, 5, 1);
  EXPECT_FALSE(queue.ready());
  EXPECT_EQ(queue.available(), 2);
  EXPECT_THROW_MESSAGE(queue.dequeue(), std::logic_error, "2 of 3 models at iteration 0");
  put(queue, 7, 0);
  ASSERT_TRUE(queue.ready());
  EXPECT_EQ(queue.dequeue(),
            (std::vector<Update>{
                {2, 0, queue.slotOf(2, 0), 0.5}, {5, 0, queue.slotOf(5, 0), 0.25}, {7, 0, queue.slotOf(7, 0), 0.25}}));
  queue.release();
  EXPECT_FALSE(queue.ready());  // taken once
  queue.advance(1);
  EXPECT_EQ(queue.available(), 1);
}

TEST(UpdateQueue, BackupTakesWhatIsThereAndDropsTheLate) {
  UpdateQueue queue(threeSenders(3, 1, 0));
  put(queue, 2, 0);
  EXPECT_FALSE(queue.ready());
  put(queue, 7, 0);
  ASSERT_TRUE(queue.ready());
  auto taken = queue.dequeue();
  ASSERT_EQ(taken.size(), 2U);
  EXPECT_EQ(taken[1].sender, 7);
  EXPECT_NEAR(taken[0].weight, 2.0 / 3, 1e-15);
  EXPECT_NEAR(taken[1].weight, 1.0 / 3, 1e-15);
  queue.release();
  queue.advance(1);
  EXPECT_EQ(queue.admit(5, 0), Admission::kDrop);
  for (const int sender : {2, 5, 7}) {
    put(queue, sender, 1);
  }
  EXPECT_EQ(queue.required(), 2);
  EXPECT_EQ(queue.dequeue().size(), 3U);  // more than required were there
}

TEST(UpdateQueue, WhatBecomesStaleOnTheWayIsDropped) {
  UpdateQueue queue(threeSenders(3, 1, 0));
  EXPECT_EQ(queue.admit(5, 0), Admission::kStore);
  put(queue, 2, 0);
  put(queue, 7, 0);
  queue.dequeue();
  queue.release();
  queue.advance(1);
  queue.enqueue(5, 0);
  EXPECT_EQ(queue.available(), 0);
  put(queue, 5, 1);
  EXPECT_EQ(queue.available(), 1);
}

TEST(UpdateQueue, StalenessTakesTheNewestInProportionToFreshness) {
  UpdateQueue queue(threeSenders(4, 0, 2));
  queue.advance(5);
  EXPECT_EQ(queue.admit(2, 2), Admission::kDrop);  // 5 - 2 = 3 is the oldest
  put(queue, 2, 3);
  put(queue, 5, 4);
  put(queue, 5, 5);
  EXPECT_FALSE(queue.ready());
  put(queue, 7, 9);
  ASSERT_TRUE(queue.ready());
  const auto taken = queue.dequeue();
  // tag - (k - s) + 1 = 1, 3, 7, times 1/2, 1/4, 1/4
  EXPECT_EQ(taken, (std::vector<Update>{{2, 3, queue.slotOf(2, 3), 0.5 / 3},
                                        {5, 5, queue.slotOf(5, 5), 0.75 / 3},
                                        {7, 9, queue.slotOf(7, 9), 1.75 / 3}}));
  queue.release();
  queue.advance(6);
  EXPECT_EQ(queue.available(), 2);  // tag 3 is too old now, the others are taken again
  put(queue, 2, 6);
  EXPECT_EQ(queue.dequeue().size(), 3U);
}

TEST(UpdateQueue, SlotsThatAreReadAreNotWritten) {
  UpdateQueue queue(threeSenders(1, 0, 3));
  for (const int sender : {2, 5, 7}) {
    put(queue, sender, 0);
  }
  queue.dequeue();
  put(queue, 5, 1);  // the other slot
  EXPECT_THROW_MESSAGE(queue.dequeue(), std::logic_error, "dequeue before release");
  EXPECT_THROW_MESSAGE(queue.advance(1), std::logic_error, "release them first");
  queue.release();
  queue.release();
  queue.advance(1);
  queue.dequeue();
  EXPECT_EQ(queue.admit(2, 2), Admission::kWait);   // its tag 0 is read again
  EXPECT_EQ(queue.admit(5, 2), Admission::kStore);  // of this one tag 1 is
  queue.release();
  EXPECT_EQ(queue.admit(2, 2), Admission::kStore);
  EXPECT_EQ(queue.available(), 2);  // what is being overwritten counts no more
}

TEST(UpdateQueue, MisuseIsNamed) {
  UpdateQueue queue(threeSenders(1, 0, 0));
  EXPECT_THROW_MESSAGE(queue.admit(2, 2), std::logic_error, "tag 2 of rank 2 at iteration 0: allowed up to 1");
  EXPECT_THROW_MESSAGE(queue.admit(3, 0), std::out_of_range, "sender = 3: allowed are the 3 in-neighbours 2 .. 7");
  EXPECT_THROW_MESSAGE(queue.enqueue(2, 0), std::logic_error, "enqueued without admit");
  EXPECT_EQ(queue.admit(2, 0), Admission::kStore);
  EXPECT_THROW_MESSAGE(queue.admit(2, 1), std::logic_error, "still arriving: one at a time");
  queue.enqueue(2, 0);
  EXPECT_THROW_MESSAGE(queue.admit(2, 0), std::logic_error, "tags must ascend");
  EXPECT_THROW_MESSAGE(static_cast<void>(queue.slotOf(2, -1)), std::out_of_range, "tag = -1");
  queue.advance(1);
  EXPECT_THROW_MESSAGE(queue.advance(0), std::logic_error, "iteration 0 after 1");
}

TEST(UpdateQueue, BadOptionsNameValueAndRange) {
  const auto refused = [](UpdateQueueOptions options, const char* part) {
    EXPECT_THROW_MESSAGE(UpdateQueue(std::move(options)), std::invalid_argument, part);
  };
  refused({.senders = {}, .weights = {}}, "senders");
  refused({.senders = {2, 1}, .weights = {0.5, 0.5}}, "ascending order");
  refused({.senders = {1, 1}, .weights = {0.5, 0.5}}, "ascending order");
  refused({.senders = {1}, .weights = {0.5, 0.5}}, "size of weights = 2: allowed 1");
  refused({.senders = {1}, .weights = {0.0}}, "weight = 0: allowed more than 0, finite; it is that of rank 1");
  refused(threeSenders(-1, 0, 0), "max_ahead = -1");
  refused(threeSenders(1, 3, 0), "backup_workers = 3: allowed 0..2 with 3 in-neighbours");
  refused(threeSenders(1, 1, 1), "staleness = 1");
  refused(threeSenders(1, 0, -1), "staleness = -1");
}

}  // namespace
}  // namespace torchext::core
