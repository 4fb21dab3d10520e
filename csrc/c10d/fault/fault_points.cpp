#include "c10d/fault/fault_points.h"

#include <array>
#include <csignal>
#include <stdexcept>

#include <unistd.h>

#include "core/base/check.h"
#include "core/base/enum_names.h"

namespace torchext {
namespace {

constexpr core::EnumNames<FaultPoint, 24> kPoints{{
    {FaultPoint::kCallAsked, "call.asked"},
    {FaultPoint::kCallAgreed, "call.agreed"},
    {FaultPoint::kCallStarted, "call.started"},
    {FaultPoint::kSubsetHeaders, "subset.headers"},
    {FaultPoint::kSubsetHalfway, "subset.halfway"},
    {FaultPoint::kWindowWritten, "window.written"},
    {FaultPoint::kGeneratorAsked, "generator.asked"},
    {FaultPoint::kGeneratorAnswered, "generator.answered"},
    {FaultPoint::kAveragePacked, "average.packed"},
    {FaultPoint::kAverageReduced, "average.reduced"},
    {FaultPoint::kHopPublished, "hop.published"},
    {FaultPoint::kHopTaken, "hop.taken"},
    {FaultPoint::kExchangeBegun, "exchange.begun"},
    {FaultPoint::kExchangeArrived, "exchange.arrived"},
    {FaultPoint::kExactAverage, "exact.average"},
    {FaultPoint::kAveragedState, "averaged.state"},
    {FaultPoint::kFaultMessageHeard, "fault_message.heard"},
    {FaultPoint::kMembershipAlive, "membership.alive"},
    {FaultPoint::kMembershipListed, "membership.listed"},
    {FaultPoint::kGroupArrived, "group.arrived"},
    {FaultPoint::kGroupConnected, "group.connected"},
    {FaultPoint::kGroupFormed, "group.formed"},
    {FaultPoint::kStateTransferSending, "state_transfer.sending"},
    {FaultPoint::kStateTransferReceiving, "state_transfer.receiving"},
}};

enum class FaultAction { kKill, kStop, kThrow };

constexpr core::EnumNames<FaultAction, 3> kActions{{
    {FaultAction::kKill, "kill"},
    {FaultAction::kStop, "stop"},
    {FaultAction::kThrow, "throw"},
}};

// Written before the point is armed.
std::atomic<FaultAction> armed_action{FaultAction::kKill};
std::atomic<int> passes_left{0};

FaultPoint pointOf(const std::string& name) { return core::parseEnum(kPoints, "fault point", name); }

}  // namespace

void detail::passArmedFaultPoint(FaultPoint point) {
  if (armed_fault_point.load(std::memory_order_acquire) != static_cast<int>(point) || passes_left.fetch_sub(1) != 0) {
    return;
  }
  armed_fault_point.store(kNoFaultPoint);
  switch (armed_action.load()) {
    case FaultAction::kKill:
      ::kill(::getpid(), SIGKILL);
      break;
    case FaultAction::kStop:
      ::kill(::getpid(), SIGSTOP);
      break;
    case FaultAction::kThrow:
      throw std::runtime_error(core::concat("fault point ", core::enumName(kPoints, "fault point", point)));
  }
}

void faultPoint(const std::string& name) { faultPoint(pointOf(name)); }

void armFaultPoint(const std::string& name, const std::string& action, int passes) {
  const FaultPoint point = pointOf(name);
  const FaultAction chosen = core::parseEnum(kActions, "action", action);
  if (passes < 0) {
    core::throwInvalid("passes", passes, "at least 0");
  }
  detail::armed_fault_point.store(detail::kNoFaultPoint);
  armed_action.store(chosen);
  passes_left.store(passes);
  detail::armed_fault_point.store(static_cast<int>(point), std::memory_order_release);
}

std::vector<std::string> faultPointNames() {
  std::vector<std::string> names;
  for (const auto& [point, name] : kPoints) {
    names.emplace_back(name);
  }
  return names;
}

}  // namespace torchext
