#include "c10d/fault/group_label.h"

#include <unistd.h>

#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace torchext {

GroupLabel::GroupLabel(std::string backend_name, int rank, int size)
    : backendName_(std::move(backend_name)), rank_(rank), size_(size), creator_(getpid()) {}

void GroupLabel::setGroupName(const std::string& name) {
  const std::lock_guard lock(mutex_);
  groupName_ = name;
}

std::string GroupLabel::text() const {
  const std::lock_guard lock(mutex_);
  return c10::str(backendName_, " [rank ", rank_, " of ", size_, groupName_.empty() ? "" : ", group ", groupName_, "]");
}

std::string GroupLabel::describe(const OpInfo& op) const { return text() + ": " + nameOf(op) + detailsOf(op); }

bool GroupLabel::inForkedChild() const noexcept { return getpid() != creator_; }

void GroupLabel::checkProcess(const char* op) const {
  if (inForkedChild()) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str(backendName_, " [rank ", rank_, " of ", size_, "]: ", op,
                             ": this group belongs to process ", creator_, " and cannot be used in its forked child ",
                             getpid(), "; create a group after the fork, or start processes by spawn"));
  }
}

}  // namespace torchext
