#include "core/auto/link_model.h"

#include <algorithm>

#include "core/base/check.h"

namespace torchext::core {
namespace {

double bothHalves(const Transport& transport, std::size_t bytes) {
  return transport.reduce_scatter.seconds(bytes) + transport.all_gather.seconds(bytes);
}

}  // namespace

const Transport& LinkModel::transport(std::size_t bytes) const {
  if (transports.empty()) {
    throwInvalid("number of transports", 0, "1 or more");
  }
  return *std::min_element(transports.begin(), transports.end(), [&](const Transport& a, const Transport& b) {
    return bothHalves(a, bytes) < bothHalves(b, bytes);
  });
}

std::size_t LinkModel::directChunkBytes() const {
  std::size_t most = 0;
  for (const Transport& measured : transports) {
    for (const auto& [bytes, seconds] : measured.reduce_scatter.points()) {
      if (transport(bytes).algorithm == Algorithm::kDirect) {
        most = std::max(most, bytes / index(network.ranks));
      }
    }
  }
  return most;
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
