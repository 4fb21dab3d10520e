// Shared windows: what one process writes is what another reads, and nothing else can be mapped or changed.
#include "core/transport/shared_window.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "core/base/check.h"
#include "core/base/host_identity.h"
#include "core/base/wire.h"
#include "tests/cpp/core/base/expect_throw.h"

namespace torchext::core {
namespace {

using namespace std::chrono_literals;

constexpr WindowShape kShape{.ranks = 3, .slots = 2, .slot_bytes = 8192};

std::byte patternOf(PieceCount piece, std::size_t i) { return static_cast<std::byte>((piece * 131 + i * 7) & 0xff); }

void fill(std::byte* slot, PieceCount piece) {
  for (std::size_t i = 0; i < kShape.slot_bytes; ++i) {
    slot[i] = patternOf(piece, i);
  }
}

bool holds(const std::byte* slot, PieceCount piece) {
  for (std::size_t i = 0; i < kShape.slot_bytes; ++i) {
    if (slot[i] != patternOf(piece, i)) {
      return false;
    }
  }
  return true;
}

// Runs `body` in a child process: whether it returned true.
bool inAnotherProcess(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(SharedWindow, APeerKnowsWhetherTheOwnersProcessLives) {
  int to_child[2];
  int to_parent[2];
  ASSERT_EQ(pipe(to_child), 0);
  ASSERT_EQ(pipe(to_parent), 0);
  const pid_t owner = fork();
  if (owner == 0) {
    const auto window = SharedWindow::create(kShape);
    const WindowAddress address = window->address();
    char word = 0;
    const bool told = write(to_parent[1], &address, sizeof(address)) == sizeof(address);
    _exit(told && read(to_child[0], &word, 1) == 1 ? 0 : 1);
  }
  WindowAddress address;
  ASSERT_EQ(read(to_parent[0], &address, sizeof(address)), static_cast<ssize_t>(sizeof(address)));
  const auto peer = SharedWindow::open(address, kShape);
  ASSERT_NE(peer, nullptr);
  EXPECT_FALSE(peer->ownerEnded());
  EXPECT_TRUE(inAnotherProcess([&] {
    rlimit none{};
    return setrlimit(RLIMIT_NOFILE, &none) == 0 && open("/dev/null", O_RDONLY) < 0 && !peer->ownerEnded();
  })) << "without descriptors nothing is known of it";
  ASSERT_EQ(write(to_child[1], "x", 1), 1);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(owner), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(peer->ownerEnded());  // a zombie
  int status = -1;
  waitpid(owner, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(peer->ownerEnded());
}

TEST(SharedWindow, AnotherProcessReadsWhatWasWrittenAndItsOwnerWaitsForIt) {
  const auto own = SharedWindow::create(kShape);
  const WindowAddress address = own->address();
  const auto child = SharedWindow::create(kShape);
  const WindowAddress child_address = child->address();
  const pid_t parent = getpid();
  constexpr PieceCount kPieces = 500;
  // The child inherits no mapping that it uses: it opens the parent's by its address, as a peer does.
  const pid_t reader = fork();
  if (reader == 0) {
    const auto peer = SharedWindow::open(address, kShape);
    bool good = peer != nullptr && getpid() != parent;
    for (PieceCount piece = 0; good && piece < kPieces; ++piece) {
      good = SharedWindow::await(peer->written(), piece + 1, 20s) && holds(peer->slot(piece), piece);
      SharedWindow::advance(child->taken(0), piece + 1);
    }
    _exit(good ? 0 : 1);
  }
  const auto peer = SharedWindow::open(child_address, kShape);
  ASSERT_NE(peer, nullptr);
  for (PieceCount piece = 0; piece < kPieces; ++piece) {
    if (piece >= 2) {
      ASSERT_TRUE(SharedWindow::await(peer->taken(0), piece - 1, 20s)) << piece;
    }
    fill(own->slot(piece), piece);
    SharedWindow::advance(own->written(), piece + 1);
  }
  int status = -1;
  waitpid(reader, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(SharedWindow, ThreadsTakeTurnsInItsSlots) {
  const auto window = SharedWindow::create(kShape);
  constexpr PieceCount kPieces = 300;
  std::thread reader([&] {
    for (PieceCount piece = 0; piece < kPieces; ++piece) {
      ASSERT_TRUE(SharedWindow::await(window->written(), piece + 1, 20s));
      EXPECT_TRUE(holds(window->slot(piece), piece));
      SharedWindow::advance(window->taken(1), piece + 1);
    }
  });
  for (PieceCount piece = 0; piece < kPieces; ++piece) {
    if (piece >= 2) {
      ASSERT_TRUE(SharedWindow::await(window->taken(1), piece - 1, 20s));
    }
    fill(window->slot(piece), piece);
    SharedWindow::advance(window->written(), piece + 1);
  }
  reader.join();
}

TEST(SharedWindow, AWaitEndsWithItsLimitAndCountsWrap) {
  const auto window = SharedWindow::create(kShape);
  SharedWindow::Counter& counter = window->written();
  EXPECT_TRUE(SharedWindow::await(counter, 0, 0ms));
  EXPECT_FALSE(SharedWindow::await(counter, 1, 0ms));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(SharedWindow::await(counter, 1, 30ms));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 30ms);
  constexpr PieceCount kLast = ~PieceCount{0};
  SharedWindow::advance(counter, kLast);
  EXPECT_TRUE(SharedWindow::reached(counter, kLast));
  EXPECT_TRUE(SharedWindow::reached(counter, kLast - 5));
  EXPECT_FALSE(SharedWindow::reached(counter, 0));  // one further
  SharedWindow::advance(counter, 1);
  EXPECT_TRUE(SharedWindow::reached(counter, kLast));
  // What follows the last count lies in the next slot.
  EXPECT_NE(window->slot(kLast), window->slot(0));
  EXPECT_EQ(window->slot(kLast), window->slot(1));
}

TEST(SharedWindow, CountersAndSlotsDoNotOverlap) {
  const auto window = SharedWindow::create(kShape);
  fill(window->slot(0), 0);
  fill(window->slot(1), 1);
  SharedWindow::advance(window->written(), 11);
  SharedWindow::advance(window->reduced(), 12);
  for (int rank = 0; rank < kShape.ranks; ++rank) {
    SharedWindow::advance(window->taken(rank), 13 + static_cast<PieceCount>(rank));
  }
  const auto peer = SharedWindow::open(window->address(), kShape);
  ASSERT_NE(peer, nullptr);
  EXPECT_EQ(peer->written().value, 11U);
  EXPECT_EQ(peer->reduced().value, 12U);
  EXPECT_EQ(peer->taken(0).value, 13U);
  EXPECT_EQ(peer->taken(2).value, 15U);
  EXPECT_TRUE(holds(peer->slot(0), 0));
  EXPECT_TRUE(holds(peer->slot(3), 1));
}

TEST(SharedWindow, OnlyWhatTheAddressSaysIsMapped) {
  const auto window = SharedWindow::create(kShape);
  const WindowAddress right = window->address();
  ASSERT_NE(SharedWindow::open(right, kShape), nullptr);
  const auto mapped = [&](const std::function<void(WindowAddress&)>& change) {
    WindowAddress address = right;
    change(address);
    return SharedWindow::open(address, kShape) != nullptr;
  };
  EXPECT_FALSE(mapped([](auto& address) { address.nonce[1] ^= 1; }));
  EXPECT_FALSE(mapped([](auto& address) { address.space ^= 1; }));
  EXPECT_FALSE(mapped([](auto& address) { address.bytes += 4096; }));
  EXPECT_FALSE(mapped([](auto& address) { address.descriptor = 1'000'000; }));
  EXPECT_FALSE(mapped([](auto& address) { address.process = 0; }));
  EXPECT_FALSE(mapped([](auto& address) { address.descriptor = 0; }));  // whatever that is
  WindowShape other = kShape;
  other.slots = 4;
  EXPECT_EQ(SharedWindow::open(right, other), nullptr);
  window->closeAddress();
  EXPECT_EQ(SharedWindow::open(right, kShape), nullptr);
  window->closeAddress();
}

TEST(SharedWindow, AFileOfTheRightSizeIsNoWindow) {
  const auto window = SharedWindow::create(kShape);
  WindowAddress address = window->address();
  const int file = memfd_create("other", MFD_CLOEXEC);  // not sealed: it could shrink under its readers
  ASSERT_GE(file, 0);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(address.bytes)), 0);
  ASSERT_EQ(pwrite(file, address.nonce.data(), sizeof(address.nonce), 0), static_cast<ssize_t>(sizeof(address.nonce)));
  address.descriptor = file;
  EXPECT_EQ(SharedWindow::open(address, kShape), nullptr);
  close(file);
}

TEST(SharedWindow, ItsSizeIsSealedAndPeersCannotWrite) {
  const auto window = SharedWindow::create(kShape);
  const std::string path = concat("/proc/self/fd/", window->address().descriptor);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(file, 0);
  EXPECT_NE(ftruncate(file, 4096), 0);
  close(file);
  const auto peer = SharedWindow::open(window->address(), kShape);
  ASSERT_NE(peer, nullptr);
  // The kernel's word on the mapping that holds the peer's slots.
  const auto wanted = reinterpret_cast<std::uintptr_t>(peer->slot(0));
  std::ifstream maps("/proc/self/maps");
  std::string line;
  bool found = false;
  while (std::getline(maps, line)) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, rights) == 3 && begin <= wanted && wanted < end) {
      EXPECT_STREQ(rights, "r--s");
      found = true;
    }
  }
  EXPECT_TRUE(found);
}

TEST(SharedWindow, OutlivesItsOwnerForThoseWhoHaveMappedIt) {
  auto window = SharedWindow::create(kShape);
  fill(window->slot(0), 5);
  const auto peer = SharedWindow::open(window->address(), kShape);
  ASSERT_NE(peer, nullptr);
  window.reset();
  EXPECT_TRUE(holds(peer->slot(0), 5));
}

TEST(SharedWindow, BadShapes) {
  for (const WindowShape& shape : {WindowShape{0, 2, 64}, WindowShape{1, 0, 64}, WindowShape{1, 3, 64},
                                   WindowShape{1, 2, 0}, WindowShape{1, 2, 100}, WindowShape{1, -2, 64}}) {
    EXPECT_THROW_MESSAGE(SharedWindow::create(shape), std::invalid_argument, "power of two");
  }
}

TEST(HostIdentity, IsTheSameInAnotherProcessOfThisHost) {
  const std::string host = hostIdentity();
  const std::string space = processSpace();
  EXPECT_EQ(space.substr(0, host.size()), host);
  EXPECT_TRUE(inAnotherProcess([&] { return hostIdentity() == host && processSpace() == space; }));
}

TEST(SharedWindow, EachSlotHasAStampOfItsOwn) {
  const auto own = SharedWindow::create(kShape);
  const auto peer = SharedWindow::open(own->address(), kShape);
  ASSERT_NE(peer, nullptr);
  for (PieceCount piece = 0; piece < 2; ++piece) {
    fill(own->slot(piece), piece);
    own->stamp(piece) = 0x1234567812345678ULL + piece;
  }
  SharedWindow::advance(own->written(), 2);
  SharedWindow::advance(own->taken(2), 7);  // the last counter, before the stamps
  for (PieceCount piece = 0; piece < 2; ++piece) {
    EXPECT_EQ(peer->stamp(piece), 0x1234567812345678ULL + piece);
    EXPECT_EQ(peer->stamp(piece + 2), peer->stamp(piece)) << "of the slot";
    EXPECT_TRUE(holds(peer->slot(piece), piece));
  }
  EXPECT_TRUE(SharedWindow::reached(peer->taken(2), 7));
}

}  // namespace
}  // namespace torchext::core
