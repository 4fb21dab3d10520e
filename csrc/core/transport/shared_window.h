// SharedWindow: memory that one process writes and others of its host read, with counters to wait on.
//
// What ranks of one host exchange needs no socket: the owner copies a piece of its data into a slot and says so by a
// counter; whoever needs it reads it where it lies. An owner has one window, and every peer maps it read-only, so that
// nobody can write what is not his. A window counts pieces 0, 1, 2, ...; piece p lies in slot p % slots.
//
//   written    pieces that may be read (the owner's own data)
//   reduced    pieces of which the owner's part is a finished result
//   taken[r]   pieces of rank r's window that the owner of this one needs no more
//
// Beside each slot is a stamp, with which an owner can say what its piece is.
//
// The memory is an unnamed file (memfd_create) of fixed size: it is gone with its last user, however that ends, counts
// as the owner's memory and takes none before it is touched. Peers open it through /proc, which takes the same user.
//
// Threads: the owner's side is one thread's at a time, and so is each peer's. Counters are atomic; a write to a slot
// happens before the advance() that announces it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace torchext::core {

struct WindowShape {
  int ranks = 0;               // of the group: entries of `taken`
  int slots = 0;               // a power of two: counts wrap
  std::size_t slot_bytes = 0;  // a multiple of 64
};

// What a peer must know to map a window, as it is sent to it.
struct WindowAddress {
  static constexpr std::uint32_t kMagic = 0x54585357;  // "TXSW"
  static constexpr std::uint32_t kVersion = 1;

  std::uint32_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint64_t space = 0;  // of processSpace(), a hash; 0: this process shares no memory
  std::int64_t process = 0;
  std::int64_t descriptor = -1;
  std::uint64_t bytes = 0;
  std::array<std::uint64_t, 2> nonce{};  // random: what the window begins with
};
static_assert(sizeof(WindowAddress) == 56, "an address is a wire format");

// The address at the front of what `source` sent. MalformedMessage if it is none.
WindowAddress parseWindowAddress(std::span<const std::byte> bytes, int source);

// Counts pieces modulo 2^32; of two counts that are compared neither is 2^31 or more ahead.
using PieceCount = std::uint32_t;

class SharedWindow {
 public:
  struct alignas(64) Counter {
    std::atomic<PieceCount> value{0};
  };

  // The owner's. std::system_error where the kernel gives no such memory.
  static std::unique_ptr<SharedWindow> create(const WindowShape& shape);
  // A peer's, read-only. Null if there is no such window any more, or if this process may not read it. `shape` must be
  // the owner's.
  static std::unique_ptr<const SharedWindow> open(const WindowAddress& address, const WindowShape& shape);

  ~SharedWindow();
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  const WindowShape& shape() const { return shape_; }
  // The owner's, until closeAddress(): once all peers have mapped it nobody needs the file's descriptor.
  WindowAddress address() const;
  void closeAddress();
  // Of a peer's window: whether the owner's process is known to have ended, so that its counters stand still for good.
  bool ownerEnded() const;

  std::byte* slot(PieceCount piece) { return memory_ + slotOffset(piece); }
  const std::byte* slot(PieceCount piece) const { return memory_ + slotOffset(piece); }

  // Written and read as the slot is.
  std::uint64_t& stamp(PieceCount piece) { return stamps()[piece % static_cast<PieceCount>(shape_.slots)]; }
  std::uint64_t stamp(PieceCount piece) const { return stamps()[piece % static_cast<PieceCount>(shape_.slots)]; }

  Counter& written() { return counters()[0]; }
  const Counter& written() const { return counters()[0]; }
  Counter& reduced() { return counters()[1]; }
  const Counter& reduced() const { return counters()[1]; }
  Counter& taken(int rank) { return counters()[2 + rank]; }
  const Counter& taken(int rank) const { return counters()[2 + rank]; }

  // Sets an own counter and wakes who waits for it, in any process.
  static void advance(Counter& counter, PieceCount count);
  static bool reached(const Counter& counter, PieceCount count) {
    return static_cast<std::int32_t>(counter.value.load(std::memory_order_acquire) - count) >= 0;
  }
  // Waits until the counter is at `count` or beyond it; false if it was not within `limit`.
  static bool await(const Counter& counter, PieceCount count, std::chrono::milliseconds limit);

 private:
  SharedWindow(const WindowShape& shape, std::byte* memory, int descriptor, std::int64_t owner);

  Counter* counters() { return reinterpret_cast<Counter*>(memory_ + 64); }
  const Counter* counters() const { return reinterpret_cast<const Counter*>(memory_ + 64); }
  std::uint64_t* stamps() const {
    return reinterpret_cast<std::uint64_t*>(memory_ + 64 +
                                            (2 + static_cast<std::size_t>(shape_.ranks)) * sizeof(Counter));
  }
  std::size_t slotOffset(PieceCount piece) const;

  const WindowShape shape_;
  std::byte* const memory_;   // nonce, counters, stamps, slots from a page's start on
  int descriptor_;            // the owner's; -1: closed, or a peer's
  const std::int64_t owner_;  // its process
};

}  // namespace torchext::core
