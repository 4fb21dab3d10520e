#include "core/prague/group_generator.h"

#include <cmath>

#include "core/base/check.h"
#include "core/base/enum_names.h"
#include "core/base/host_map.h"
#include "core/prague/group_generator_base.h"

namespace torchext::core {
namespace {

constexpr EnumNames<GeneratorKind, 5> kGeneratorNames{{
    {GeneratorKind::kRandom, "random"},
    {GeneratorKind::kDivision, "division"},
    {GeneratorKind::kInterIntra, "inter-intra"},
    {GeneratorKind::kSmart, "smart"},
    {GeneratorKind::kReadySet, "ready-set"},
}};

void validate(const GeneratorOptions& options) {
  if (options.world_size < 1) {
    throwInvalid("world_size", options.world_size, "1 or more");
  }
  if (options.group_size < 1 || options.group_size > options.world_size) {
    throwInvalid("group_size", options.group_size, concat("1..world_size = 1..", options.world_size));
  }
  if (options.slowdown_threshold < 0) {
    throwInvalid("slowdown_threshold", options.slowdown_threshold, "0 (no filter) or more requests");
  }
  if (!std::isfinite(options.deadline_factor) || options.deadline_factor < 0) {
    throwInvalid("deadline_factor", options.deadline_factor, "0 or more, finite");
  }
  if (!std::isfinite(options.longest_wait) || options.longest_wait < 0) {
    throwInvalid("longest_wait", options.longest_wait, "0 or more seconds, finite");
  }
  if (options.kind == GeneratorKind::kInterIntra && options.host_of.empty()) {
    throwInvalid("size of host_of", 0, concat("world_size = ", options.world_size, " for generator inter-intra"));
  }
  HostMap::fromHostOf(options.host_of, options.world_size);
  HostMap::fromHostOf(options.rack_of, options.world_size);
}

}  // namespace

GeneratorKind parseGeneratorKind(const std::string& name) { return parseEnum(kGeneratorNames, "generator", name); }

const char* toString(GeneratorKind kind) { return enumName(kGeneratorNames, "GeneratorKind", kind); }

std::unique_ptr<GroupGenerator> makeGroupGenerator(const GeneratorOptions& options) {
  validate(options);
  switch (options.kind) {
    case GeneratorKind::kRandom:
      return makeRandomGenerator(options);
    case GeneratorKind::kReadySet:
      return makeReadySetGenerator(options);
    case GeneratorKind::kDivision:
    case GeneratorKind::kInterIntra:
    case GeneratorKind::kSmart:
      return makeDivisionGenerator(options);
  }
  throwInvalid("GeneratorKind", static_cast<int>(options.kind), concat("0..", kGeneratorNames.size() - 1));
}

}  // namespace torchext::core
