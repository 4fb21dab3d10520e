#include "c10d/backend/process_group_dear.h"

#include <utility>

#include "c10d/backend/living_backends.h"

namespace torchext {

void ProcessGroupDear::Options::validate() const { checkEach(*this); }

ProcessGroupDear::ProcessGroupDear(int rank, int size, InnerBackends inner, c10::intrusive_ptr<Options> options,
                                   const std::string& name)
    : AttachableBackend(rank, size, name, std::move(inner), options), dear_options_(std::move(options)) {
  dear_options_->validate();
}

ProcessGroupDear::~ProcessGroupDear() { ProcessGroupDear::shutdown(); }

c10::intrusive_ptr<c10d::Backend> ProcessGroupDear::createChild(int rank, int size, InnerBackends inner,
                                                                c10::intrusive_ptr<c10d::Backend::Options> options) {
  auto own = childOptions(*dear_options_, *options);
  return makeBackend<ProcessGroupDear>(rank, size, std::move(inner), std::move(own), getBackendName());
}

}  // namespace torchext
