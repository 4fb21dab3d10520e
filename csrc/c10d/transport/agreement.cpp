#include "c10d/transport/agreement.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace torchext {
namespace {

// Of what travels: values end with it, and hold none.
constexpr char kEnd = '\n';

std::string joined(const std::vector<std::string>& values) {
  std::string text;
  for (const std::string& value : values) {
    text += value;
    text += kEnd;
  }
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> values;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(kEnd, begin), text.size());
    values.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return values;
}

// The root's text, to all.
std::vector<std::string> valuesOf(const AgreementGroup& group, int root, const AgreementField& own) {
  const std::string text = joined(own.values);
  const at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  group.broadcast(length, root);
  const auto bytes = length.item<std::int64_t>();
  const at::Tensor message = at::zeros({bytes}, at::kByte);
  if (bytes > 0) {  // else there is no memory
    std::memcpy(message.mutable_data_ptr(), text.data(), std::min(text.size(), static_cast<std::size_t>(bytes)));
  }
  group.broadcast(message, root);
  return split({static_cast<const char*>(message.const_data_ptr()), static_cast<std::size_t>(bytes)});
}

std::string difference(const AgreementField& field, const std::vector<std::string>& expected,
                       const std::vector<std::string>& got, std::int64_t rank) {
  const auto say = [rank](const std::string& what, const auto& left, const auto& right) {
    return c10::str(what, " is ", left, " on rank 0 and ", right, " on rank ", rank);
  };
  if (expected.size() != got.size()) {
    return say("the number of " + field.name, expected.size(), got.size());
  }
  const auto at = static_cast<std::size_t>(
      std::distance(expected.begin(), std::mismatch(expected.begin(), expected.end(), got.begin()).first));
  TORCH_INTERNAL_ASSERT(at < expected.size(), "hashes of equal values differ");
  return say(field.several ? c10::str(field.name, "[", at, "]") : field.name, expected[at], got[at]);
}

}  // namespace

std::int64_t agreementHash(const std::string& text) {
  std::uint64_t hash = 1469598103934665603ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  return static_cast<std::int64_t>(hash);
}

void agree(const AgreementGroup& group, const std::string& who, const AgreementFields& fields,
           const std::string& way_out) {
  const auto width = static_cast<std::int64_t>(fields.size());
  const at::Tensor own = at::empty({width}, at::kLong);
  std::transform(fields.begin(), fields.end(), own.mutable_data_ptr<std::int64_t>(),
                 [](const AgreementField& field) { return agreementHash(joined(field.values)); });
  const at::Tensor all = at::empty({group.size, width}, at::kLong);
  group.gather(own, all);
  const auto* const hashes = all.const_data_ptr<std::int64_t>();
  for (std::int64_t rank = 1; rank < group.size; ++rank) {
    const auto* const first = std::mismatch(hashes, hashes + width, hashes + rank * width).first;
    if (first == hashes + width) {
      continue;
    }
    const AgreementField& field = fields[static_cast<std::size_t>(first - hashes)];
    const std::vector<std::string> expected = valuesOf(group, 0, field);
    const std::vector<std::string> got = valuesOf(group, static_cast<int>(rank), field);
    C10_THROW_ERROR(DistBackendError, c10::str(who, ": ", difference(field, expected, got, rank), "; ", way_out));
  }
}

}  // namespace torchext
