#include "c10d/backend/connecting_store.h"

#include <algorithm>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "c10d/threads/interruptible_wait.h"

namespace torchext {
namespace {

constexpr const char* kRefused = "refused";
constexpr std::chrono::milliseconds kLongestPause{20};

std::vector<std::uint8_t> encoded(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

void ConnectingStore::refuse(const std::string& reason) { compareSet(kRefused, encoded(""), encoded(reason)); }

void ConnectingStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::chrono::milliseconds pause{1};
  while (!check(keys)) {
    if (check({kRefused})) {
      const auto reason = PrefixStore::get(kRefused);
      C10_THROW_ERROR(DistStoreError, std::string(reason.begin(), reason.end()));
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      C10_THROW_ERROR(DistStoreError, c10::str("waited ", timeout.count(), " ms in the store for ",
                                               c10::Join(", ", keys), "; do all ranks run?"));
    }
    checkSignals();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

std::vector<std::uint8_t> ConnectingStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<std::uint8_t>> ConnectingStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

}  // namespace torchext
