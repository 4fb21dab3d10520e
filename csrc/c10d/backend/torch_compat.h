// Every torch-version gate of csrc/c10d lives in this header, so that the same source builds on torch 2.11 and 2.15.
//
// CompatBackend and CompatWork sit between c10d's classes and ours. They turn virtuals that only newer releases have
// into forwards to the CUDA inner backend (the only one that implements them) or into calls of a virtual of ours that
// exists on every release. Classes above them contain no `#if`.
//
// Names: torch 2.15 calls the single-tensor collectives `all_gather_single` and so on, and keeps the older names
// (`_allgather_base`, ...) as virtual aliases. We override and call the older names, which both releases understand.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

// c10d::Backend has reconfigure, windows, hooks, time estimates, gather_into_tensor, suspend/resume, cloneable Options.
#if defined(C10D_BACKEND_HAS_HOOKS) && defined(C10D_BACKEND_HAS_WINDOW)
#define TORCHEXT_C10D_NEWER_BACKEND 1
#else
#define TORCHEXT_C10D_NEWER_BACKEND 0
#endif

// c10d has a flight recorder for each backend, within reach of other libraries. For flight_record.cpp, the one source
// that may ask: it does nothing without.
#if __has_include(<torch/csrc/distributed/c10d/hooks/FlightRecorderHook.hpp>)
#define TORCHEXT_C10D_FLIGHT_RECORDERS 1
#else
#define TORCHEXT_C10D_FLIGHT_RECORDERS 0
#endif

namespace torchext {

// c10d::Work with the same virtuals on every torch.
class CompatWork : public c10d::Work {
 public:
  using c10d::Work::Work;
#if TORCHEXT_C10D_NEWER_BACKEND
  std::chrono::milliseconds getTimeout() const override { return workTimeout(); }
#endif

 protected:
  // The time this work may take, in milliseconds.
  virtual std::chrono::milliseconds workTimeout() const = 0;
};

// c10d::Backend with the same virtuals on every torch.
class CompatBackend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;

#if TORCHEXT_C10D_NEWER_BACKEND
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override { extendTimeout(timeout); }
  c10::intrusive_ptr<c10d::Work> gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                    const c10d::GatherOptions& opts) override {
    return gatherSingle(output, input, opts);
  }
  bool isInitialized() override { return !deviceInner() || deviceInner()->isInitialized(); }
  void startTimeEstimate() override { needDeviceInner("startTimeEstimate").startTimeEstimate(); }
  float endTimeEstimate() override { return needDeviceInner("endTimeEstimate").endTimeEstimate(); }
  bool supportsWindow() const override { return deviceInner() && deviceInner()->supportsWindow(); }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override {
    return needDeviceInner("new_window").new_window(tensor);
  }
  bool supportsAbortHooks() const override { return deviceInner() && deviceInner()->supportsAbortHooks(); }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    needDeviceInner("registerAbortHook").registerAbortHook(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override { needDeviceInner("unregisterAbortHook").unregisterAbortHook(id); }
  bool supportsCompletionHooks() const override { return deviceInner() && deviceInner()->supportsCompletionHooks(); }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    needDeviceInner("registerCompletionHook").registerCompletionHook(id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t id) override {
    needDeviceInner("unregisterCompletionHook").unregisterCompletionHook(id);
  }
  void setBoundDeviceId(std::optional<at::Device> device) override {
    c10d::Backend::setBoundDeviceId(device);
    if (deviceInner()) {
      deviceInner()->setBoundDeviceId(device);
    }
  }
  void suspend() override { needDeviceInner("suspend").suspend(); }
  void resume() override { needDeviceInner("resume").resume(); }
  std::unordered_map<std::string, uint64_t> getMemoryStats() override {
    return needDeviceInner("getMemoryStats").getMemoryStats();
  }
#endif

 protected:
  // Adds `timeout` to that of the calls that follow, where the inner backends can.
  virtual void extendTimeout(const std::chrono::milliseconds& timeout) = 0;
  // Gathers one tensor a rank into one flat tensor on the root.
  virtual c10::intrusive_ptr<c10d::Work> gatherSingle(at::Tensor& output, at::Tensor& input,
                                                      const c10d::GatherOptions& opts) = 0;
  // The inner backend of CUDA tensors, null without one.
  virtual c10d::Backend* deviceInner() const = 0;

  c10d::Backend& needDeviceInner(const char* what) const {
    TORCH_CHECK_NOT_IMPLEMENTED(deviceInner() != nullptr, getBackendName(), ": ", what,
                                " needs the NCCL inner backend, and this group has none (no GPU is visible)");
    return *deviceInner();
  }
};

inline void addEphemeralTimeoutIfAny([[maybe_unused]] c10d::Backend& backend,
                                     [[maybe_unused]] const std::chrono::milliseconds& timeout) {
#if TORCHEXT_C10D_NEWER_BACKEND
  backend.addEphemeralTimeout(timeout);
#endif
}

inline c10::intrusive_ptr<c10d::Work> gatherSingleIfAny([[maybe_unused]] c10d::Backend& backend,
                                                        [[maybe_unused]] at::Tensor& output,
                                                        [[maybe_unused]] at::Tensor& input,
                                                        [[maybe_unused]] const c10d::GatherOptions& opts) {
#if TORCHEXT_C10D_NEWER_BACKEND
  return backend.gather_into_tensor(output, input, opts);
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "gather_single needs torch 2.15 or newer");
#endif
}

// A copy of a backend's options of the same type, so that a child group can change its own. Older torch cannot copy
// options it does not know: there the object is shared, as its own splitGroup does.
inline c10::intrusive_ptr<c10d::Backend::Options> cloneOptions(
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
#if TORCHEXT_C10D_NEWER_BACKEND
  return options ? options->clone() : options;
#else
  return options;
#endif
}

}  // namespace torchext
