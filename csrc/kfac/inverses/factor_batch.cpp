#include "kfac/inverses/factor_batch.h"

#include <map>
#include <utility>

#include "kfac/linalg/factor_operators.h"

namespace torchext {
namespace {

struct Attempt {
  at::Tensor matrix;  // [count, d, d]
  at::Tensor values;  // [count, d], of eigenvectors
  at::Tensor good;    // [count], whether the two can be used
};

// The inverse is a product of L^-1 with itself: ATen's own inverse from L waits for the device to look for errors.
Attempt choleskyInverses(const at::Tensor& damped) {
  const auto [lower, info] = at::linalg_cholesky_ex(damped);
  const std::int64_t dim = damped.size(-1);
  const at::Tensor one = at::eye(dim, damped.options()).unsqueeze(0);
  const at::Tensor half = at::linalg_solve_triangular(lower, one, /*upper=*/false);
  const at::Tensor packed = at::empty({damped.size(0), dim * (dim + 1) / 2}, damped.options());
  operators::packedGram(packed, half, /*by_dimension=*/false, /*append_one=*/false, /*add=*/false);
  // NaN passes through Cholesky with info 0 on some backends: the last diagonal element depends on all others.
  return {
      operators::unpackTriangle(packed, dim), {}, info.eq(0).logical_and(lower.diagonal(0, -2, -1).isfinite().all(-1))};
}

Attempt eigenvectorsOfAll(const at::Tensor& factors) {
  try {
    const auto [values, vectors] = at::linalg_eigh(factors);
    return {vectors.contiguous(), values.clamp_min(0),
            values.isfinite().all(-1).logical_and(vectors.flatten(1).isfinite().all(-1))};
  } catch (const c10::LinAlgError&) {  // one of them did not converge
    if (factors.size(0) == 1) {
      return {at::zeros_like(factors), at::zeros_like(factors.select(-1, 0)),
              at::zeros({1}, factors.options().dtype(at::kBool))};
    }
  }
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> good;
  for (const at::Tensor& factor : factors.split(1)) {
    Attempt one = eigenvectorsOfAll(factor);
    matrices.push_back(std::move(one.matrix));
    values.push_back(std::move(one.values));
    good.push_back(std::move(one.good));
  }
  return {at::cat(matrices), at::cat(values), at::cat(good)};
}

// Tries the factors with these numbers; returns the numbers of those that failed.
std::vector<std::size_t> tryAll(const std::vector<FactorToInvert>& factors, const std::vector<std::size_t>& numbers,
                                InverseForm form, at::ScalarType type, std::vector<FactorInverse>& results) {
  std::map<std::pair<std::int64_t, bool>, std::vector<std::size_t>> batches;
  for (const std::size_t number : numbers) {
    batches[{factors[number].factor.size(-1), factors[number].everywhere}].push_back(number);
  }
  std::vector<std::size_t> order;
  std::vector<at::Tensor> good;  // one number for each factor, in that order
  for (const auto& [key, members] : batches) {
    std::vector<at::Tensor> matrices;
    std::vector<at::Tensor> damping;
    for (const std::size_t number : members) {
      matrices.push_back(factors[number].factor.to(type));
      if (form == InverseForm::kInverse) {
        damping.push_back(factors[number].damping.to(type));
      }
    }
    const at::Tensor batch = at::cat(matrices);  // a copy: the damping stays out of what is tried again
    if (form == InverseForm::kInverse) {
      batch.diagonal(0, -2, -1).add_(at::cat(damping).unsqueeze(-1));
    }
    const Attempt found = form == InverseForm::kInverse ? choleskyInverses(batch) : eigenvectorsOfAll(batch);
    std::int64_t begin = 0;
    for (const std::size_t number : members) {
      const at::Tensor& factor = factors[number].factor;
      const auto part = [&](const at::Tensor& all) {
        return all.defined() ? all.narrow(0, begin, factor.size(0)).to(factor.scalar_type()).contiguous()
                             : at::Tensor();
      };
      results[number] = {part(found.matrix), part(found.values)};
      good.push_back(found.good.narrow(0, begin, factor.size(0)).all());
      order.push_back(number);
      begin += factor.size(0);
    }
  }
  std::vector<std::size_t> failed;
  const at::Tensor answers = at::stack(good).cpu();  // the wait
  const bool* answer = answers.const_data_ptr<bool>();
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (!answer[i]) {
      results[order[i]] = {};
      failed.push_back(order[i]);
    }
  }
  return failed;
}

}  // namespace

std::vector<FactorInverse> invertFactors(const std::vector<FactorToInvert>& factors, InverseForm form,
                                         InverseFailures& failures) {
  std::vector<FactorInverse> results(factors.size());
  if (factors.empty()) {
    return results;
  }
  std::vector<std::size_t> numbers(factors.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = i;
  }
  const at::ScalarType type = factors.front().factor.scalar_type();
  std::vector<std::size_t> failed = tryAll(factors, numbers, form, type, results);
  if (!failed.empty() && type != at::kDouble) {
    failures.retried += static_cast<std::int64_t>(failed.size());
    failed = tryAll(factors, failed, form, at::kDouble, results);
  }
  failures.kept += static_cast<std::int64_t>(failed.size());
  return results;
}

}  // namespace torchext
