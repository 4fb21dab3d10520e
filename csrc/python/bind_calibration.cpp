// Bindings of the calibration of a group's links. No logic but which transport a group has; the interpreter lock is
// released.
#include "python/bind_group.h"

#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "c10d/backend/shard_rooms.h"

#include "c10d/threads/interruptible_task.h"
#include "c10d/transport/hosts_of.h"
#include "c10d/transport/link_calibration.h"
#include "c10d/transport/shard_collectives.h"
#include "c10d/transport/shard_exchange.h"
#include "core/transport/alpha_beta.h"

namespace torchext {
namespace {

// As dear sends: messages on the CPU, collectives elsewhere. Collective: finds rooms.
LinkMeasurement calibrate(const c10::intrusive_ptr<c10d::Backend>& backend, AttachableBackend* own, c10::Device device,
                          double max_seconds) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<LinkCalibration::Shards> shards;
  if (!device.is_cpu()) {
    shards.push_back({"", std::make_unique<ShardCollectives>(backend)});
    return LinkCalibration(backend, device, std::nullopt, 0, std::move(shards), max_seconds, start).run();
  }
  constexpr int kExchangeTags = 2;
  const PointToPoint transport = own != nullptr ? own->dataTransport() : transportOf(backend);
  const int tag = own != nullptr ? own->nextChannel() : AttachableBackend::kGroupTags;
  shards.push_back({"", std::make_unique<ShardExchange>(transport, tag)});
  const core::RankGrid grid = core::roomGrid(roomsOf(transport, *backend));
  if (grid != core::ringGrid(backend->getSize())) {
    shards.push_back(
        {"_hierarchical", std::make_unique<ShardExchange>(transport, tag + kExchangeTags, ShardTuning(), grid)});
  }
  return LinkCalibration(backend, device, transport, tag + 2 * kExchangeTags, std::move(shards), max_seconds, start)
      .run();
}

// own: of the group, where its backend is one of ours.
LinkMeasurement calibrateLinks(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               const c10::intrusive_ptr<AttachableBackend>& own, c10::Device device,
                               double max_seconds) {
  const c10::intrusive_ptr<c10d::Backend> backend = group->getBackend(device.type());
  const auto result = std::make_shared<LinkMeasurement>();
  runInterruptibly(
      "tx_calibrate",
      [group, own, backend, device, max_seconds, result] {
        *result = calibrate(backend, own.get(), device, max_seconds);
      },
      [&] { group->abort(); });
  return *result;
}

std::vector<int> hostsOfRanks(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device) {
  const c10::intrusive_ptr<c10d::Backend> backend = group->getBackend(device.type());
  const auto result = std::make_shared<std::vector<int>>();
  runInterruptibly(
      "tx_hosts", [backend, device, result] { *result = hostsOf(agreementGroup(*backend), device); },
      [&] { group->abort(); });
  return *result;
}

// (latency in seconds, seconds a byte) of the straight line through (bytes, seconds).
std::pair<double, double> fitLine(const std::vector<std::pair<std::size_t, double>>& points) {
  std::vector<core::CommSample> samples;
  samples.reserve(points.size());
  for (const auto& [bytes, seconds] : points) {
    samples.push_back({bytes, seconds});
  }
  const core::AlphaBeta line = core::fitAlphaBeta(samples);
  return {line.alpha, line.beta};
}

}  // namespace

void bindCalibration(py::module_& module) {
  py::class_<LinkTable>(module, "LinkTable")
      .def_readonly("operation", &LinkTable::operation)
      .def_readonly("bytes", &LinkTable::bytes)
      .def_readonly("seconds", &LinkTable::seconds)
      .def_readonly("spread", &LinkTable::spread);

  py::class_<LinkMeasurement>(module, "LinkMeasurement")
      .def_readonly("tables", &LinkMeasurement::tables)
      .def_readonly("host_of", &LinkMeasurement::host_of)
      .def_readonly("copy_bytes_per_second", &LinkMeasurement::copy_bytes_per_second)
      .def_readonly("operations_per_second", &LinkMeasurement::operations_per_second)
      .def_readonly("elapsed_seconds", &LinkMeasurement::elapsed_seconds);

  module.def("calibrate_links", &calibrateLinks, py::arg("group"), py::arg("own").none(true), py::arg("device"),
             py::arg("max_seconds"), NoGil());
  module.def("hosts_of", &hostsOfRanks, py::arg("group"), py::arg("device"), NoGil());
  module.def("fit_line", &fitLine, py::arg("points"));
}

}  // namespace torchext
