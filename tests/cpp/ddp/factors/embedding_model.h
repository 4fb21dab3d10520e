// EmbeddingModel is a table whose rows travel, on one rank: what the tests of embeddings are tried on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "c10d/backend/attachable_backend.h"
#include "ddp/factors/factor_embedding.h"

namespace torchext {

struct EmbeddingModel {
  static constexpr std::int64_t kIndices = 7;
  static constexpr std::int64_t kWidth = 3;
  static constexpr std::int64_t kPadding = 2;
  static constexpr std::int64_t kPlaces = 6;

  explicit EmbeddingModel(AttachableBackend& group, at::ScalarType type = at::kDouble)
      : table(tableOf(type)),
        factors(
            std::make_shared<SufficientFactors>(c10::intrusive_ptr<AttachableBackend>::reclaim_copy(&group),
                                                std::vector<FactorLayer>{{"table", table, at::Tensor(), kPlaces,
                                                                          FactorLayer::Kind::kEmbedding, kPadding}})) {}

  static at::Tensor tableOf(at::ScalarType type) {
    return at::arange(kIndices * kWidth, type).view({kIndices, kWidth}).requires_grad_();
  }
  // Some come twice, and some are the padding index.
  static at::Tensor indices(int rank, int step, std::int64_t count) {
    return (at::arange(count, at::kLong) * (rank + 2) + step).remainder(kIndices);
  }
  // Of each row another gradient, which float has exactly.
  static at::Tensor weights(const at::Tensor& indices, int seed, at::ScalarType type) {
    return (at::arange(indices.numel() * kWidth, type) * 5 + seed).remainder(13).sub(6).view({-1, kWidth});
  }

  void backward(const at::Tensor& indices, int seed, bool averages = true) const {
    factors->expect(averages);
    const at::Tensor rows = factorEmbedding(factors, 0, indices, table);
    (rows * weights(indices, seed, table.scalar_type())).sum().backward();
  }

  // What torch has for the same.
  struct Plain {
    explicit Plain(at::ScalarType type) : table(tableOf(type)) {}
    void backward(const at::Tensor& indices, int seed) const {
      const at::Tensor rows = at::embedding(table, indices, kPadding);
      (rows * weights(indices, seed, table.scalar_type())).sum().backward();
    }
    at::Tensor mean(int ranks) const { return table.grad() / ranks; }
    at::Tensor table;
  };

  at::Tensor table;
  std::shared_ptr<SufficientFactors> factors;
};

}  // namespace torchext
