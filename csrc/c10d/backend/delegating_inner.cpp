// DelegatingBackend's inner backends: which of them carries what, what is passed on to them, when they are let go.
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "c10d/backend/delegating_backend.h"
#include "c10d/threads/bounded_thread.h"

namespace torchext {

InnerBackends DelegatingBackend::innerBackends() const {
  const std::lock_guard lock(innerMutex_);
  return inner_;
}

void DelegatingBackend::dropInner(Dropped which, std::chrono::milliseconds limit) noexcept {
  health_->callbacks().finish(limit);
  auto inner = std::make_unique<InnerBackends>();
  {
    const std::lock_guard lock(innerMutex_);
    std::swap(*inner, inner_);
    if (which == Dropped::kGloo) {
      std::swap(inner->cuda, inner_.cuda);
    }
  }
  monitor_->releaseGroup();
  if (!health_->failed()) {
    return;
  }
  // Gloo's destructor joins its workers. After a failure one of them may still be inside a call: give it a moment, then
  // leave the rest to a thread of its own. Where none is to be had the groups are left for good.
  try {
    BoundedThread("torchext_drop", [dropped = inner.release()] { delete dropped; }).finish(limit);
  } catch (const std::exception& error) {
    LOG(WARNING) << health_->label() << ": the inner groups are not destroyed: " << error.what();
  }
}

c10::intrusive_ptr<c10d::Backend> DelegatingBackend::inner(c10::DeviceType device) const {
  InnerBackends inner = innerBackends();
  if (device == c10::DeviceType::CPU) {
    if (!inner.cpu) {
      std::rethrow_exception(health_->failureOf({.name = "a call"}));
    }
    return inner.cpu;
  }
  if (device == c10::DeviceType::CUDA) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        inner.cuda, health_->label(),
        ": a CUDA tensor was given, but this group has no NCCL inner backend, because no GPU was "
        "visible to torch when the group was created; move the tensor to the CPU, or make a GPU "
        "visible before init_process_group()");
    return inner.cuda;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, health_->label(), ": tensors on ", c10::DeviceTypeName(device, true),
                              " are not carried; this backend takes cpu and cuda tensors");
}

void DelegatingBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  const InnerBackends inner = innerBackends();
  for (const auto& backend : {inner.cpu, inner.cuda}) {
    if (backend) {
      backend->setTimeout(timeout);
    }
  }
}

void DelegatingBackend::extendTimeout(const std::chrono::milliseconds& timeout) {
  const InnerBackends inner = innerBackends();
  for (const auto& backend : {inner.cpu, inner.cuda}) {
    if (backend) {
      addEphemeralTimeoutIfAny(*backend, timeout);
    }
  }
}

c10d::ErrorType DelegatingBackend::getError() {
  if (health_->failed()) {
    return c10d::ErrorType::REMOTE_ERROR;
  }
  const auto cuda = innerBackends().cuda;
  return cuda ? cuda->getError() : c10d::ErrorType::SUCCESS;
}

void DelegatingBackend::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  if (options_->group_name.empty()) {
    health_->setGroupName(uid);
  }
  const InnerBackends inner = innerBackends();
  for (const auto& backend : {inner.cpu, inner.cuda}) {
    if (backend) {
      backend->setGroupUid(uid);
    }
  }
}

void DelegatingBackend::eagerConnectSingleDevice(at::Device device) {
  const auto cuda = innerBackends().cuda;
  if (cuda && device.is_cuda()) {
    cuda->eagerConnectSingleDevice(device);
  }
}

bool DelegatingBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  const auto cuda = innerBackends().cuda;
  return cuda && cuda->supportsTensorAlloc(index);
}

at::Tensor DelegatingBackend::allocateTensor(long size, at::TensorOptions options) {
  return needDeviceInner("allocateTensor").allocateTensor(size, options);
}

std::shared_ptr<c10::Allocator> DelegatingBackend::getMemAllocator() {
  return needDeviceInner("getMemAllocator").getMemAllocator();
}

void DelegatingBackend::enableCollectivesTiming() {
  const InnerBackends inner = innerBackends();
  for (const auto& backend : {inner.cpu, inner.cuda}) {
    if (backend) {
      backend->enableCollectivesTiming();
    }
  }
}

bool DelegatingBackend::supportsTimeEstimation() const {
  const auto cuda = innerBackends().cuda;
  return cuda && cuda->supportsTimeEstimation();
}

bool DelegatingBackend::supportsSplitting() const {
  const auto gloo = innerBackends().cpu;
  return gloo && gloo->supportsSplitting();
}

void DelegatingBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  needDeviceInner("registerOnCompletionHook").registerOnCompletionHook(std::move(hook));
}

void DelegatingBackend::waitForPendingWorks() { needDeviceInner("waitForPendingWorks").waitForPendingWorks(); }

}  // namespace torchext
