#include "c10d/transport/link_calibration.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "c10d/threads/outstanding_averages.h"
#include "c10d/transport/hosts_of.h"

namespace torchext {
namespace {

using Clock = std::chrono::steady_clock;

double secondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double medianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Every second sample, from `first` on.
std::vector<double> everySecond(const std::vector<double>& samples, std::size_t first) {
  std::vector<double> half;
  for (std::size_t i = first; i < samples.size(); i += 2) {
    half.push_back(samples[i]);
  }
  return half;
}

// Of several repeats, the first to warm up.
double medianSeconds(const std::function<void()>& call) {
  call();
  std::vector<double> samples;
  for (int repeat = 0; repeat < LinkCalibration::kRepeats; ++repeat) {
    const auto start = Clock::now();
    call();
    samples.push_back(secondsSince(start));
  }
  return medianOf(std::move(samples));
}

}  // namespace

LinkCalibration::LinkCalibration(c10::intrusive_ptr<c10d::Backend> group, c10::Device device,
                                 std::optional<PointToPoint> transport, int tag, std::vector<Shards> shards,
                                 double max_seconds, Clock::time_point start)
    : group_(std::move(group)),
      device_(device),
      transport_(std::move(transport)),
      tag_(tag),
      shards_(std::move(shards)),
      max_seconds_(max_seconds),
      start_(start) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device_);
  const std::int64_t elements = std::max<std::int64_t>(kMostBytes / 4, group_->getSize());
  memory_ = at::zeros({elements}, options);
  received_ = at::zeros({elements}, options);
  addOperations();
}

void LinkCalibration::addOperations() {
  operations_.push_back({"all_reduce", [this](const at::Tensor& buffer) {
                           std::vector<at::Tensor> tensors{buffer};
                           group_->allreduce(tensors, c10d::AllreduceOptions())->wait();
                         }});
  for (const auto& [suffix, transport] : shards_) {
    const auto finish = [](const std::unique_ptr<ShardOperation>& operation) {
      operation->begin();
      operation->finish([] {});
      operation->drain();
    };
    ShardTransport* const shards = transport.get();
    operations_.push_back({"reduce_scatter" + suffix, [this, finish, shards](const at::Tensor& buffer) {
                             finish(shards->reduceScatter(buffer, 1.0 / group_->getSize()));
                           }});
    operations_.push_back(
        {"all_gather" + suffix, [finish, shards](const at::Tensor& buffer) { finish(shards->allGather(buffer)); }});
  }
  if (transport_) {
    operations_.push_back({"p2p", [this](const at::Tensor& buffer) { sendToNext(buffer); }});
  }
  operations_.push_back({"rows", [this](const at::Tensor& buffer) {
                           const std::int64_t rows = buffer.numel() / group_->getSize();
                           std::vector<at::Tensor> inputs{buffer.narrow(0, 0, rows)};
                           const at::Tensor all = received_.narrow(0, 0, buffer.numel());
                           std::vector<std::vector<at::Tensor>> outputs{all.view({group_->getSize(), rows}).unbind()};
                           group_->allgather(outputs, inputs, c10d::AllgatherOptions())->wait();
                         }});
}

void LinkCalibration::sendToNext(const at::Tensor& buffer) {
  constexpr const char* kWhat = "calibrating";
  const int next = (group_->getRank() + 1) % group_->getSize();
  const int before = (group_->getRank() + group_->getSize() - 1) % group_->getSize();
  const auto receive = transport_->recv(received_.narrow(0, 0, buffer.numel()), before, tag_);
  const auto send = transport_->send(buffer, next, tag_);
  transport_->wait(receive, before, kWhat);
  transport_->wait(send, next, kWhat);
}

LinkMeasurement LinkCalibration::run() {
  const InternalCollective internal;
  const at::NoGradGuard no_grad;
  LinkMeasurement result;
  result.host_of = hostsOf(agreementGroup(*group_), device_);
  timeMachine(result);
  grow();
  repeat();
  result.tables = tables();
  result.elapsed_seconds = largest({elapsed()}).front();
  return result;
}

void LinkCalibration::timeMachine(LinkMeasurement& result) {
  constexpr std::int64_t kSide = 512;
  constexpr std::int64_t kRows = 64;
  const auto options = memory_.options();
  const at::Tensor left = at::ones({kSide, kRows}, options);
  const at::Tensor right = at::ones({kRows, kSide}, options);
  at::Tensor product = at::empty({kSide, kSide}, options);
  barrier();
  const double copying = medianSeconds([&] {
    received_.copy_(memory_);
    synchronize();
  });
  const double multiplying = medianSeconds([&] {
    at::mm_out(product, left, right);
    synchronize();
  });
  const std::vector<double> seconds = largest({copying, multiplying});
  result.copy_bytes_per_second = static_cast<double>(memory_.nbytes()) / seconds[0];
  result.operations_per_second = static_cast<double>(2 * kSide * kSide * kRows) / seconds[1];
}

// Size by size, and at each one operation after the other. The first kFirstRepeats; the fastest counts in forecasts, in
// which one lost packet would drop all larger sizes.
void LinkCalibration::grow() {
  for (const Operation& operation : operations_) {
    timeOf(operation, kFirstBytes, 1);  // connections open, and memory is touched
  }
  for (std::int64_t bytes = kFirstBytes;; bytes *= kGrowth) {
    for (Operation& operation : operations_) {
      if (operation.growing) {
        operation.sizes.push_back(
            {.bytes = bytes, .estimate = 0.0, .calls = callsOf(bytes, forecast(operation)), .samples = {}});
      }
    }
    for (int round = 0; round < kFirstRepeats; ++round) {
      for (Operation& operation : operations_) {
        if (operation.growing) {
          Size& size = operation.sizes.back();
          size.samples.push_back(timeOf(operation, bytes, size.calls));
        }
      }
    }
    std::vector<double> own;
    own.reserve(operations_.size() + 1);
    for (const Operation& operation : operations_) {
      const std::vector<double>& samples = operation.sizes.back().samples;
      own.push_back(*std::min_element(samples.begin(), samples.end()));
    }
    own.push_back(elapsed());
    const std::vector<double> agreed = largest(own);
    double next_size = 0.0;  // seconds of its calls
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      Operation& operation = operations_[i];
      const double seconds = agreed[i];
      if (operation.growing) {
        operation.sizes.back().estimate = seconds;
        const bool is_short = bytes == kFirstBytes || seconds < std::chrono::duration<double>(kLongCall).count();
        operation.growing = bytes < kMostBytes && is_short;
        const double next = forecast(operation);
        next_size += operation.growing ? static_cast<double>(callsOf(bytes * kGrowth, next)) * next : 0.0;
      }
    }
    const double planned = agreed.back() + (kRepeats - kFirstRepeats) * estimateOfRound() + kRepeats * next_size;
    if (next_size == 0.0 || (bytes > kFirstBytes && planned > max_seconds_)) {
      return;
    }
  }
}

double LinkCalibration::forecast(const Operation& operation) {
  if (operation.sizes.empty()) {
    return 0.0;
  }
  const double last = operation.sizes.back().estimate;
  if (operation.sizes.size() == 1) {
    return last;
  }
  const double before = operation.sizes[operation.sizes.size() - 2].estimate;
  return std::clamp(last + static_cast<double>(kGrowth) * (last - before), last, static_cast<double>(kGrowth) * last);
}

std::int64_t LinkCalibration::callsOf(std::int64_t bytes, double seconds) {
  const double most = std::chrono::duration<double>(kStream).count() / std::max(seconds, 1e-9);
  const double calls = std::min(most, static_cast<double>(kStreamBytes) / static_cast<double>(bytes));
  return static_cast<std::int64_t>(std::clamp(calls, 1.0, static_cast<double>(kMostCalls)));
}

double LinkCalibration::estimateOfRound() const {
  double seconds = 0.0;
  for (const Operation& operation : operations_) {
    for (const Size& size : operation.sizes) {
      seconds += size.estimate * static_cast<double>(size.calls);
    }
  }
  return seconds;
}

void LinkCalibration::repeat() {
  for (int round = kFirstRepeats; round < kMostRepeats; ++round) {
    const auto begin = Clock::now();
    for (Operation& operation : operations_) {
      for (Size& size : operation.sizes) {
        size.samples.push_back(timeOf(operation, size.bytes, size.calls));
      }
    }
    if (round + 1 >= kRepeats) {
      const std::vector<double> agreed = largest({elapsed(), secondsSince(begin)});
      if (agreed[0] + agreed[1] > max_seconds_) {
        return;
      }
    }
  }
}

std::vector<LinkTable> LinkCalibration::tables() {
  std::vector<double> medians;  // of each size: of all samples, of the even ones, of the odd ones
  for (const Operation& operation : operations_) {
    for (const Size& size : operation.sizes) {
      medians.push_back(medianOf(size.samples));
      medians.push_back(medianOf(everySecond(size.samples, 0)));
      medians.push_back(medianOf(everySecond(size.samples, 1)));
    }
  }
  medians = largest(medians);
  std::vector<LinkTable> result;
  auto median = medians.cbegin();
  for (const Operation& operation : operations_) {
    LinkTable table{.operation = operation.name};
    double even = 0.0;
    double odd = 0.0;
    for (const Size& size : operation.sizes) {
      const auto bytes = static_cast<std::int64_t>(bufferOf(size.bytes).nbytes());
      table.bytes.push_back(operation.name == "rows" ? bytes / group_->getSize() : bytes);
      table.seconds.push_back(*median++);
      even += *median++;
      odd += *median++;
    }
    table.spread = std::abs(even - odd) / std::min(even, odd);
    result.push_back(std::move(table));
  }
  return result;
}

void LinkCalibration::synchronize() const {
  if (!device_.is_cpu()) {
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  }
}

void LinkCalibration::barrier() {
  std::vector<at::Tensor> tensors{at::zeros({1}, memory_.options())};
  group_->allreduce(tensors, c10d::AllreduceOptions())->wait();
  synchronize();
}

double LinkCalibration::timeOf(const Operation& operation, std::int64_t bytes, std::int64_t calls) {
  const at::Tensor buffer = bufferOf(bytes);
  barrier();
  const auto start = Clock::now();
  for (std::int64_t call = 0; call < calls; ++call) {
    operation.call(buffer);
  }
  synchronize();
  return secondsSince(start) / static_cast<double>(calls);
}

// Of equal chunks, one a rank: so it may be somewhat smaller.
at::Tensor LinkCalibration::bufferOf(std::int64_t bytes) const {
  const std::int64_t ranks = group_->getSize();
  const std::int64_t chunk = std::max<std::int64_t>(1, bytes / static_cast<std::int64_t>(sizeof(float)) / ranks);
  return memory_.narrow(0, 0, chunk * ranks);
}

std::vector<double> LinkCalibration::largest(const std::vector<double>& own) {
  at::Tensor values = at::tensor(own, at::kDouble).to(device_);
  std::vector<at::Tensor> tensors{values};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group_->allreduce(tensors, options)->wait();
  values = values.cpu();
  const auto* data = values.const_data_ptr<double>();
  return {data, data + values.numel()};
}

double LinkCalibration::elapsed() const { return secondsSince(start_); }

PointToPoint transportOf(const c10::intrusive_ptr<c10d::Backend>& group) {
  const auto wait = [](const PointToPoint::WorkPtr& work, int peer, const char* what) {
    TORCH_CHECK_WITH(DistBackendError, work->wait(), what, ": the wait for rank ", peer, " was aborted");
  };
  return {group, wait, nullptr, nullptr};
}

}  // namespace torchext
