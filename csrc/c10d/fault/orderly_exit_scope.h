// OrderlyExitScope marks a thread that ends a group because its process leaves it: an uncaught exception, a script that
// is over, destroy_process_group(). Then its barrier is no other's (headerOfOrderlyExit), it does not count itself
// among those that go on (AttachableBackend::announceMember), and the others know that it is gone
// (FirstReason::lostRanks).
#pragma once

namespace torchext {

// As long as it lives, on the thread that made it: failure callbacks run on the thread that ends the group.
class OrderlyExitScope {
 public:
  OrderlyExitScope() { ++depth; }
  ~OrderlyExitScope() { --depth; }
  OrderlyExitScope(const OrderlyExitScope&) = delete;
  OrderlyExitScope& operator=(const OrderlyExitScope&) = delete;

  static bool here() { return depth > 0; }

 private:
  inline static thread_local int depth = 0;
};

}  // namespace torchext
