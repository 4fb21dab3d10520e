// startThread: a named thread, or an error that says what is short.
//
// A process may be refused a thread (EAGAIN) at any time, where a limit of processes is reached. So who starts one in a
// constructor has it as the last member, or delegates to a constructor that starts none: then the destructor runs when
// this throws, and ends what has begun.
#pragma once

#include <pthread.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace torchext {

// name: 15 characters at most. Throws std::runtime_error.
inline std::thread startThread(const std::string& name, std::function<void()> body) {
  try {
    return std::thread([name, body = std::move(body)] {
      pthread_setname_np(pthread_self(), name.c_str());
      body();
    });
  } catch (const std::system_error& error) {
    throw std::runtime_error("torchext: the system refuses this process another thread (" + name + ": " + error.what() +
                             "); raise the limit of processes (ulimit -u, or the container's limit of pids), or run "
                             "fewer of them");
  }
}

}  // namespace torchext
