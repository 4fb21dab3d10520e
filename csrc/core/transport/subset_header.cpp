#include "core/transport/subset_header.h"

#include <limits>

#include "core/base/wire.h"

namespace torchext::core {

SubsetHeader parseSubsetHeader(std::span<const std::byte> bytes, int source) {
  const auto header = readFront<SubsetHeader>(bytes, "header");
  // c10::ScalarType is one byte; a number beyond it would name another type once it is cut.
  const bool dtype_fits = header.dtype >= 0 && header.dtype <= std::numeric_limits<std::int8_t>::max();
  if (header.magic != SubsetHeader::kMagic || header.version != SubsetHeader::kVersion || header.rank != source ||
      !dtype_fits || header.numel < 0) {
    throwMalformed("header from rank ", source, " (magic ", header.magic, ", version ", header.version, ", rank ",
                   header.rank, ", dtype ", header.dtype, ", ", header.numel,
                   " elements): do all ranks run the same torchext?");
  }
  return header;
}

}  // namespace torchext::core
