#include "c10d/fault/closed_in_children.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace torchext {
namespace {

using EventLoop = ClosedInChildren::EventLoop;
using Watched = ClosedInChildren::Watched;

struct WatchedLoops {
  std::mutex mutex;
  std::map<const ClosedInChildren*, std::vector<EventLoop>> loops;
};

WatchedLoops& watchedLoops() {
  static auto* instance = new WatchedLoops;  // never destroyed: a process may fork at any time
  return *instance;
}

// Nothing where they cannot be listed: no /proc, or no descriptor left.
std::optional<std::vector<int>> eventLoops() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), &closedir);
  if (!folder) {
    return std::nullopt;
  }
  std::vector<int> loops;
  while (const dirent* entry = readdir(folder.get())) {
    char target[64];
    const ssize_t length = readlinkat(dirfd(folder.get()), entry->d_name, target, sizeof(target));
    if (length > 0 && std::string_view(target, static_cast<std::size_t>(length)) == "anon_inode:[eventpoll]") {
      loops.push_back(std::atoi(entry->d_name));
    }
  }
  return loops;
}

std::optional<ino_t> socketInode(int descriptor) {
  struct stat status {};
  if (fstat(descriptor, &status) != 0 || !S_ISSOCK(status.st_mode)) {
    return std::nullopt;
  }
  return status.st_ino;
}

// The sockets that an event loop watches, if it stores pointers with them.
std::vector<Watched> socketsOf(int loop) {
  std::vector<Watched> sockets;
  std::ifstream lines("/proc/self/fdinfo/" + std::to_string(loop));
  for (std::string line; std::getline(lines, line);) {
    int descriptor = -1;
    std::uint64_t data = 0;
    std::uint64_t inode = 0;
    if (std::sscanf(line.c_str(), "tfd: %d events: %*x data: %" SCNx64 " pos:%*d ino:%" SCNx64, &descriptor, &data,
                    &inode) != 3) {
      continue;
    }
    if (data == static_cast<std::uint64_t>(descriptor)) {
      return {};
    }
    if (const auto own = socketInode(descriptor); own && *own == inode) {
      sockets.push_back({descriptor, *own});
    }
  }
  return sockets;
}

void beforeFork() { watchedLoops().mutex.lock(); }

void afterForkInParent() { watchedLoops().mutex.unlock(); }

// Memory may be taken here: glibc makes malloc usable in the child of a process with threads.
void afterForkInChild() {
  auto& all = watchedLoops();
  for (const auto& [owner, loops] : all.loops) {
    for (const EventLoop& loop : loops) {
      const std::vector<Watched> sockets = socketsOf(loop.descriptor);
      // Of a group that has ended meanwhile: the number may be another loop's by now.
      const bool same = std::any_of(sockets.begin(), sockets.end(), [&](const Watched& socket) {
        return std::find(loop.sockets.begin(), loop.sockets.end(), socket) != loop.sockets.end();
      });
      if (same) {
        std::for_each(sockets.begin(), sockets.end(), [](const Watched& socket) { close(socket.descriptor); });
        close(loop.descriptor);
      }
    }
  }
  all.loops.clear();
  all.mutex.unlock();
}

}  // namespace

ClosedInChildren::ClosedInChildren() : before_(eventLoops()) {}

ClosedInChildren::~ClosedInChildren() {
  const std::lock_guard<std::mutex> lock(watchedLoops().mutex);
  watchedLoops().loops.erase(this);
}

void ClosedInChildren::watch() {
  static const int registered = pthread_atfork(&beforeFork, &afterForkInParent, &afterForkInChild);
  std::vector<EventLoop> loops;
  const auto now = eventLoops();
  if (!before_ || !now) {
    return;
  }
  for (const int descriptor : *now) {
    if (std::find(before_->begin(), before_->end(), descriptor) != before_->end()) {
      continue;
    }
    if (auto sockets = socketsOf(descriptor); !sockets.empty()) {
      std::for_each(sockets.begin(), sockets.end(),
                    [](const Watched& socket) { fcntl(socket.descriptor, F_SETFD, FD_CLOEXEC); });
      loops.push_back({descriptor, std::move(sockets)});
    }
  }
  if (registered == 0 && !loops.empty()) {
    const std::lock_guard<std::mutex> lock(watchedLoops().mutex);
    watchedLoops().loops[this] = std::move(loops);
  }
}

}  // namespace torchext
