// Promises: what the attached models of this process owe other workers, kept before this process waits for anybody.
//
// A group that the generator has formed counts on all its members: until each has sent its parameters the others wait.
// A worker sends when its own training reaches that group. If it blocks before - in a collective of all ranks, or for
// the average of another model - while a member of the group waits for it, two workers can wait for each other for
// ever: a model's groups stand in one order for all its members, but nothing orders them against a collective or
// against another model's groups. So whoever is about to block first has every other model keep what it promised.
//
// One list a process, because the models of two process groups block each other just as well.
// Threads: all functions may be called from any; a callback runs on the thread that is about to block and may block
// itself. remove() does not wait for a callback that is running.
#pragma once

#include <cstdint>
#include <functional>

namespace torchext {

class Promises {
 public:
  // Returns an id, never 0.
  static std::uint64_t add(std::function<void()> keep);
  static void remove(std::uint64_t id);
  // Runs every callback but that of `except`. Their exceptions pass through. Nothing inside an InternalCollective.
  static void keepAll(std::uint64_t except = 0);
};

// Around collectives that an attached model makes itself, when its promises have been kept.
class InternalCollective {
 public:
  InternalCollective();
  ~InternalCollective();
  InternalCollective(const InternalCollective&) = delete;
  InternalCollective& operator=(const InternalCollective&) = delete;
};

}  // namespace torchext
