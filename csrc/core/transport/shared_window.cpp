#include "core/transport/shared_window.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

#include "core/base/check.h"
#include "core/base/host_identity.h"
#include "core/base/wire.h"

namespace torchext::core {
namespace {

static_assert(std::atomic<PieceCount>::is_always_lock_free && sizeof(std::atomic<PieceCount>) == sizeof(std::uint32_t),
              "the kernel waits on the counter itself");

constexpr std::size_t kPage = 4096;

std::size_t slotsBegin(const WindowShape& shape) {
  const std::size_t counters = 64 + (2 + index(shape.ranks)) * sizeof(SharedWindow::Counter);
  const std::size_t stamps = index(shape.slots) * sizeof(std::uint64_t);
  return (counters + stamps + kPage - 1) / kPage * kPage;
}

std::size_t bytesOf(const WindowShape& shape) {
  return slotsBegin(shape) + static_cast<std::size_t>(shape.slots) * shape.slot_bytes;
}

// FNV-1a; never 0, which is the space of nobody.
std::uint64_t ownSpace() {
  std::uint64_t hash = 1469598103934665603ULL;
  for (const char c : processSpace()) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  return std::max<std::uint64_t>(hash, 1);
}

[[noreturn]] void throwSystemError(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Not of one process (FUTEX_PRIVATE_FLAG): the kernel finds the waiters by file and offset.
long futex(const SharedWindow::Counter& counter, int operation, std::uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, &counter.value, operation, value, limit, nullptr, 0);
}

}  // namespace

WindowAddress parseWindowAddress(std::span<const std::byte> bytes, int source) {
  const auto address = readFront<WindowAddress>(bytes, "window address");
  if (address.magic != WindowAddress::kMagic || address.version != WindowAddress::kVersion || address.process < 0 ||
      address.process > INT_MAX || address.descriptor < -1 || address.descriptor > INT_MAX) {
    throwMalformed("window address from rank ", source, " (magic ", address.magic, ", version ", address.version,
                   ", process ", address.process, ", descriptor ", address.descriptor,
                   "): do all ranks run the same torchext?");
  }
  return address;
}

SharedWindow::SharedWindow(const WindowShape& shape, std::byte* memory, int descriptor, std::int64_t owner)
    : shape_(shape), memory_(memory), descriptor_(descriptor), owner_(owner) {}

std::unique_ptr<SharedWindow> SharedWindow::create(const WindowShape& shape) {
  const bool power_of_two = shape.slots > 0 && (shape.slots & (shape.slots - 1)) == 0;
  if (shape.ranks < 1 || !power_of_two || shape.slot_bytes == 0 || shape.slot_bytes % 64 != 0) {
    throwInvalid("WindowShape", concat(shape.ranks, " ranks, ", shape.slots, " slots of ", shape.slot_bytes, " bytes"),
                 "1 rank or more, a power of two of slots, and slots of whole lines of 64 bytes");
  }
  const int descriptor = memfd_create("torchext", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) {
    throwSystemError("memfd_create");
  }
  // A file that shrinks under a mapping would kill its readers: its size is sealed.
  if (ftruncate(descriptor, static_cast<off_t>(bytesOf(shape))) != 0 ||
      fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(descriptor);
    errno = error;
    throwSystemError("a shared window's size");
  }
  void* memory = mmap(nullptr, bytesOf(shape), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    errno = error;
    throwSystemError("mmap of a shared window");
  }
  std::unique_ptr<SharedWindow> window(new SharedWindow(shape, static_cast<std::byte*>(memory), descriptor, getpid()));
  for (int i = 0; i < 2 + shape.ranks; ++i) {
    new (window->counters() + i) Counter();
  }
  if (getrandom(memory, sizeof(WindowAddress::nonce), 0) != static_cast<ssize_t>(sizeof(WindowAddress::nonce))) {
    throwSystemError("getrandom");
  }
  return window;
}

WindowAddress SharedWindow::address() const {
  WindowAddress address;
  address.space = ownSpace();
  address.process = getpid();
  address.descriptor = descriptor_;
  address.bytes = bytesOf(shape_);
  std::memcpy(address.nonce.data(), memory_, sizeof(address.nonce));
  return address;
}

std::unique_ptr<const SharedWindow> SharedWindow::open(const WindowAddress& address, const WindowShape& shape) {
  if (address.space != ownSpace() || address.bytes != bytesOf(shape)) {
    return nullptr;
  }
  // What stands under that number may be any file by now, or of another process: only a window of this size that
  // begins with the nonce is believed, and nothing that a mere opening could change.
  const std::string path = concat("/proc/", address.process, "/fd/", address.descriptor);
  struct stat file {};
  if (stat(path.c_str(), &file) != 0 || !S_ISREG(file.st_mode)) {
    return nullptr;
  }
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    return nullptr;
  }
  // Sealed, so that no access beyond its end is possible later.
  const int seals = fcntl(descriptor, F_GET_SEALS);
  const bool whole = fstat(descriptor, &file) == 0 && static_cast<std::uint64_t>(file.st_size) == address.bytes &&
                     seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  void* memory = whole ? mmap(nullptr, address.bytes, PROT_READ, MAP_SHARED, descriptor, 0) : MAP_FAILED;
  close(descriptor);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  std::unique_ptr<const SharedWindow> window(
      new SharedWindow(shape, static_cast<std::byte*>(memory), -1, address.process));
  return std::memcmp(memory, address.nonce.data(), sizeof(address.nonce)) == 0 ? std::move(window) : nullptr;
}

SharedWindow::~SharedWindow() {
  closeAddress();
  munmap(memory_, bytesOf(shape_));
}

void SharedWindow::closeAddress() {
  if (descriptor_ >= 0) {
    close(descriptor_);
    descriptor_ = -1;
  }
}

// A process that nobody has waited for yet is a zombie: its entry is there, and says so behind the name in brackets.
// Where nothing can be found out, for want of a descriptor say, it has not ended.
bool SharedWindow::ownerEnded() const {
  const auto none = [] { return errno == ENOENT || errno == ESRCH; };
  const int entry = ::open(concat("/proc/", owner_, "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (entry < 0) {
    return none();
  }
  std::array<char, 128> line{};  // number, name (of 64 bytes at most), state
  const ssize_t length = ::read(entry, line.data(), line.size());
  const bool gone = length < 0 && none();
  close(entry);
  const std::string_view text(line.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  const std::size_t name_end = text.rfind(')');
  const std::size_t state = name_end == std::string_view::npos ? text.size() : name_end + 2;
  return gone || (state < text.size() && (text[state] == 'Z' || text[state] == 'X'));
}

std::size_t SharedWindow::slotOffset(PieceCount piece) const {
  return slotsBegin(shape_) + (piece % static_cast<PieceCount>(shape_.slots)) * shape_.slot_bytes;
}

void SharedWindow::advance(Counter& counter, PieceCount count) {
  counter.value.store(count, std::memory_order_release);
  futex(counter, FUTEX_WAKE, INT_MAX, nullptr);
}

bool SharedWindow::await(const Counter& counter, PieceCount count, std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (true) {
    const PieceCount seen = counter.value.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(seen - count) >= 0) {
      return true;
    }
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) {
      return false;
    }
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec most{.tv_sec = static_cast<time_t>(seconds.count()),
                        .tv_nsec = std::chrono::duration_cast<std::chrono::nanoseconds>(left - seconds).count()};
    futex(counter, FUTEX_WAIT, seen, &most);  // whatever it says: the counter is looked at again
  }
}

}  // namespace torchext::core
