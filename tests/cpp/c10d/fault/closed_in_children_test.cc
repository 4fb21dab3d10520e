#include "c10d/fault/closed_in_children.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace torchext {
namespace {

bool isOpen(int descriptor) { return fcntl(descriptor, F_GETFD) != -1; }

// An event loop as Gloo's, which stores pointers with its descriptors, or as Python's, which stores the descriptor.
struct Loop {
  explicit Loop(bool pointers) : pointers_(pointers) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    watch(sockets[0]);
  }
  ~Loop() {
    for (const int open : {descriptor, sockets[0], sockets[1]}) {
      close(open);
    }
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void watch(int socket) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (pointers_) {
      event.data.ptr = this;
    } else {
      event.data.fd = socket;
    }
    EXPECT_EQ(epoll_ctl(descriptor, EPOLL_CTL_ADD, socket, &event), 0);
  }

  const int descriptor = epoll_create1(0);
  int sockets[2] = {-1, -1};

 private:
  const bool pointers_;
};

template <class Check>
bool inChild(Check check) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(check() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status == 0;
}

TEST(ClosedInChildren, ClosesTheGroupsSocketsInTheChildOnly) {
  const Loop earlier(true);
  ClosedInChildren closed;
  Loop mine(true);
  const Loop others(false);
  closed.watch();
  Loop connected(false);
  mine.watch(connected.sockets[1]);  // after watch()
  EXPECT_TRUE(inChild([&] {
    return !isOpen(mine.descriptor) && !isOpen(mine.sockets[0]) && !isOpen(connected.sockets[1]) &&
           isOpen(mine.sockets[1]) && isOpen(connected.sockets[0]) && isOpen(earlier.sockets[0]) &&
           isOpen(others.descriptor) && isOpen(others.sockets[0]);
  }));
  EXPECT_TRUE(isOpen(mine.descriptor));
  EXPECT_EQ(fcntl(mine.sockets[0], F_GETFD), FD_CLOEXEC);
  char byte = 0;
  EXPECT_EQ(write(mine.sockets[1], "x", 1), 1);
  EXPECT_EQ(read(mine.sockets[0], &byte, 1), 1);  // the child has shut nothing down
}

TEST(ClosedInChildren, LeavesANumberThatMeansSomethingElseByNow) {
  ClosedInChildren closed;
  auto* first = new Loop(true);
  closed.watch();
  const int number = first->descriptor;
  delete first;
  const Loop second(true);
  ASSERT_EQ(second.descriptor, number);
  EXPECT_TRUE(inChild([&] { return isOpen(second.descriptor) && isOpen(second.sockets[0]); }));
}

TEST(ClosedInChildren, ForgetsAGroupThatIsGone) {
  Loop* mine = nullptr;
  {
    ClosedInChildren closed;
    mine = new Loop(true);
    closed.watch();
  }
  EXPECT_TRUE(inChild([&] { return isOpen(mine->sockets[0]); }));
  delete mine;
}

}  // namespace
}  // namespace torchext
