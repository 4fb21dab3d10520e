#include "core/auto/link_model.h"

#include <algorithm>

#include "core/base/check.h"

namespace torchext::core {

const Transport& LinkModel::transport(const std::string& algorithm) const {
  const auto found = std::ranges::find_if(
      transports, [&](const Transport& measured) { return toString(measured.algorithm) == algorithm; });
  if (found == transports.end()) {
    std::string measured;
    for (const Transport& each : transports) {
      measured += concat(measured.empty() ? "" : ", ", toString(each.algorithm));
    }
    throwInvalid("algorithm", algorithm, measured.empty() ? "none, for none was measured" : measured);
  }
  return *found;
}

LinkModel LinkModel::on(const Network& other) const {
  LinkModel result = *this;
  result.network = other;
  result.all_reduce = scaledTable(all_reduce, Operation::kAllReduce, Algorithm::kRing, network, other);
  if (rows) {
    result.rows = scaledTable(*rows, Operation::kRows, Algorithm::kRing, network, other);
  }
  result.transports.clear();
  for (const auto& [algorithm, reduce_scatter, all_gather] : transports) {
    if (algorithmFits(algorithm, other)) {
      result.transports.push_back({algorithm, scaledTable(reduce_scatter, Operation::kHalf, algorithm, network, other),
                                   scaledTable(all_gather, Operation::kHalf, algorithm, network, other)});
    }
  }
  return result;
}

}  // namespace torchext::core
