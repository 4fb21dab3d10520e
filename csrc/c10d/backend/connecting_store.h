// ConnectingStore: the store over which the inner groups of one backend connect.
//
// Gloo waits in the store for the addresses of all ranks. A rank that cannot connect says why in the same place
// (refuse()), and every wait in the store ends with that reason. Waits on the script's thread run the handlers of
// signals meanwhile (interruptible_wait.h).
//
// Threads: as the store that it is made of.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace torchext {

class ConnectingStore : public c10d::PrefixStore {
 public:
  explicit ConnectingStore(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("connecting", std::move(store)) {}

  // The first reason stays.
  void refuse(const std::string& reason);

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  // Throws c10::DistStoreError with the reason of refuse(), or when the keys do not come in time.
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
};

}  // namespace torchext
