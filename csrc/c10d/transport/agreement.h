// agree() compares what all ranks of a group must have alike (tensors of a model, options) before it is used.
//
// How
//   One all-gather of a hash for each field. All ranks see all hashes, and so decide alike. Only where they differ a
//   second exchange brings the texts of the first difference, rank 0's and that of the first rank that has another, so
//   that the error shows both values.
//
// Threads: collective, on the thread that calls it, without the interpreter lock.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace torchext {

// What is compared: its name in the message, and its value as the message shows it. With several values each is one of
// several things, "name[i]" in the message; then their number is compared, too.
struct AgreementField {
  template <class Value>
  AgreementField(std::string name_in, const Value& value) : name(std::move(name_in)), values{shown(value)} {}
  AgreementField(std::string name_in, std::vector<std::string> values_in)
      : name(std::move(name_in)), values(std::move(values_in)), several(true) {}

  std::string name;
  std::vector<std::string> values;
  bool several = false;

 private:
  template <class Value>
  static std::string shown(const Value& value) {
    if constexpr (std::same_as<Value, bool>) {
      return value ? "True" : "False";
    } else if constexpr (std::floating_point<Value>) {
      char digits[32];  // NOLINT(modernize-avoid-c-arrays): the shortest text that gives the same number
      return {digits, std::to_chars(std::begin(digits), std::end(digits), value).ptr};
    } else if constexpr (std::integral<Value>) {
      return std::to_string(value);
    } else if constexpr (requires { value.has_value(); }) {
      return value.has_value() ? shown(*value) : "None";
    } else {
      return std::string(value);
    }
  }
};

using AgreementFields = std::vector<AgreementField>;

// Of a text: FNV-1a.
std::int64_t agreementHash(const std::string& text);

// The collectives that an agreement takes, of any class of groups.
struct AgreementGroup {
  int size;
  // all: [size, own.numel()]
  std::function<void(const at::Tensor& own, const at::Tensor& all)> gather;
  std::function<void(const at::Tensor& tensor, int root)> broadcast;
};

// group: a c10d::Backend or c10d::ProcessGroup for CPU tensors; outlives what is returned.
template <class Group>
AgreementGroup agreementGroup(Group& group) {
  return {group.getSize(),
          [&group](const at::Tensor& own, const at::Tensor& all) {
            std::vector<at::Tensor> inputs{own};
            std::vector<std::vector<at::Tensor>> outputs{all.unbind()};
            group.allgather(outputs, inputs, c10d::AllgatherOptions())->wait();
          },
          [&group](const at::Tensor& tensor, int root) {
            std::vector<at::Tensor> tensors{tensor};
            c10d::BroadcastOptions options;
            options.rootRank = root;
            group.broadcast(tensors, options)->wait();
          }};
}

// Collective; the same names on all ranks. Throws c10::DistBackendError on every rank unless all values are the same
// everywhere: "who: name is A on rank 0 and B on rank 2; way_out".
void agree(const AgreementGroup& group, const std::string& who, const AgreementFields& fields,
           const std::string& way_out);

}  // namespace torchext
