// AttachableBackend: a DelegatingBackend that models can be attached to (torchext.attach).
//
// What an attached model's synchronizer (csrc/ddp) needs of its group, whatever the algorithm: transports over the
// inner groups, tags of its own, and a word before the group ends. Subclasses add their options and extra collectives.
//
// Threads: everything from any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "c10d/backend/delegating_backend.h"
#include "c10d/backend/flight_record.h"
#include "c10d/transport/point_to_point.h"

namespace torchext {

class SharedWindows;

class AttachableBackend : public DelegatingBackend {
 public:
  using DelegatingBackend::DelegatingBackend;

  // Transports over the inner groups, waiting under this group's timeout, interruptible by abort().
  PointToPoint dataTransport();
  PointToPoint controlTransport();
  // SharedWindows::open() over the first. A peer that has died meanwhile is named, as in any wait.
  std::unique_ptr<SharedWindows> shareMemory(int tag, bool enabled);

  // The first of kTagsPerChannel tags for one attached model; the same on all ranks that attach in the same order.
  int nextChannel();
  static constexpr int kTagsPerChannel = 8;
  // As many, for collectives of the group itself. High, so that they never meet a user's dist.send(tag=...).
  static constexpr int kGroupTags = 0x40000000;

  // Where operations of this group are recorded that are no collectives.
  FlightLog& flights() { return flights_; }

  // Called first thing in shutdown(), so that an attached model can leave in order; until removed. Must not throw.
  std::uint64_t addShutdownCallback(std::function<void()> callback);
  // Afterwards it does not run any more: waits for one that does, but not for itself.
  void removeShutdownCallback(std::uint64_t id);
  // For such a callback, where other workers still train with its model: waits until `left`, which looks for as long as
  // it is told, or the group has failed. Every wait of the model has the group's timeout, so this one ends. What a
  // signal's handler raises ends the group on every rank, and shutdown() raises it when it is over. False, at once,
  // outside shutdown(): a process that is on its way out does not wait.
  bool outwaitTraining(const std::function<bool(std::chrono::milliseconds)>& left) noexcept;

  // Tells all ranks that the training of a model waits for others here, after so many steps. channel: of nextChannel();
  // meeting: how often its workers have met.
  void tellStep(int channel, std::uint32_t meeting, std::int64_t steps) noexcept;
  // The most steps that any rank has told since that meeting; 0 when nobody has.
  std::int64_t furthestStep(int channel, std::uint32_t meeting) const;

  // Ends the group: because of this error its worker does not come to where all are to meet.
  void abandonMeeting(const std::exception_ptr& error);

  // Writes in `store` what becomes of this worker, under its number among those that train a model: "alive/<number>"
  // when the group fails, for it lives, whatever its training thread is doing (at once if it has failed already); and
  // "gone/<number>" when it leaves the others, before they could miss it. Also after a failure: they would wait for it
  // in the group that they make then.
  void announceMember(const c10::intrusive_ptr<c10d::Store>& store, int number);
  // First thing when an attached model leaves with the group or the process.
  void announceLeaving();
  // When this group has failed and its worker trains on: that it leaves this group is no news then.
  void withdrawAnnouncements();

  // Keeps what serves an attached model, also when the model is forgotten: other workers count on it, and Python's
  // garbage collector runs at another moment on each of them. Until release() or the end of the group.
  void keep(std::shared_ptr<void> synchronizer);
  // Returns what was kept, for the caller to let go of; null if nothing was.
  std::shared_ptr<void> release(const void* synchronizer);

 protected:
  // The options of a child that split() makes: the parent's, with what torch decides taken from `given`.
  template <class Own>
  static c10::intrusive_ptr<Own> childOptions(const Own& parent, const Options& given) {
    auto own = c10::make_intrusive<Own>(parent);
    own->timeout = given.timeout;
    own->group_name = given.group_name;
    own->group_desc = given.group_desc;
    own->global_ranks_in_group = given.global_ranks_in_group;
    return own;
  }

  void onShutdown() override;  // overriders call it first
  void beforeCollective() override;
  void beforeMessage() override;

 private:
  PointToPoint::WaitUntilFunction untilSeen();
  PointToPoint::RefuseFunction refusal();

  FlightLog flights_{*this};
  std::mutex mutex_;  // guards what follows
  int channels_ = 0;
  std::map<std::uint64_t, std::function<void()>> shutdown_callbacks_;
  std::map<const void*, std::shared_ptr<void>> kept_;
  std::vector<std::function<void()>> announcements_;  // of leaving
  std::uint64_t next_callback_ = 0;
  std::uint64_t running_callback_ = 0;  // of shutdown; 0: none
  std::thread::id shutdown_thread_;     // that runs it
  std::condition_variable callback_over_;
};

}  // namespace torchext
