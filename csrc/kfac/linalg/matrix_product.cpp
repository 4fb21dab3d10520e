#include "kfac/linalg/matrix_product.h"

#include <algorithm>
#include <limits>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

// NOLINTBEGIN(readability-identifier-naming): the names of BLAS
extern "C" {
__attribute__((weak)) void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                                  const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                                  const float* beta, float* c, const int* ldc);
__attribute__((weak)) void dgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                                  const double* alpha, const double* a, const int* lda, const double* b, const int* ldb,
                                  const double* beta, double* c, const int* ldc);
}
// NOLINTEND(readability-identifier-naming)

namespace torchext {
namespace {

template <class T>
auto blasGemm() {
  if constexpr (std::is_same_v<T, float>) {
    return &sgemm_;
  } else {
    return &dgemm_;
  }
}

template <class T>
at::Tensor stored(const T* data, bool transpose, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  // from_blob takes no const data; nothing here writes to it.
  const auto strides = transpose ? std::array<std::int64_t, 2>{1, stride} : std::array<std::int64_t, 2>{stride, 1};
  return at::from_blob(const_cast<T*>(data), {rows, columns}, strides,  // NOLINT(cppcoreguidelines-pro-type-const-cast)
                       at::TensorOptions(c10::CppTypeToScalarType<T>::value));
}

std::optional<bool>& answerOfTests() {
  static std::optional<bool> answer;
  return answer;
}

// Whether oneDNN is to make a product of these sizes: a question of torch's settings of it, too.
bool usesLinear(std::int64_t m, std::int64_t n, std::int64_t k) {
  // Below it, what a call costs besides is more than is saved.
  constexpr std::int64_t kSmallest = std::int64_t{1} << 21;
  if (!prefersLinearProducts() || m * n * k < kSmallest || !at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  const auto precision = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return precision != at::Float32Precision::BF16 && precision != at::Float32Precision::TF32;
}

// Torch's own operator of a linear layer on oneDNN.
using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                          c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);

// None where torch was built without oneDNN, or has changed the operator.
std::optional<c10::TypedOperatorHandle<Linear>> findLinear() {
  const auto schema = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  try {
    return schema ? std::optional(schema->typed<Linear>()) : std::nullopt;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

// c = a b^T + beta c. b without gaps: oneDNN falls back to plain loops otherwise. False: it is not there.
bool multiplyLinear(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t stride_a,
                    const float* b, float beta, float* c, std::int64_t stride_c) {
  static const auto linear = findLinear();
  if (!linear) {
    return false;
  }
  const at::Tensor product = linear->call(stored(a, false, m, k, stride_a), stored(b, false, n, k, k), std::nullopt,
                                          "none", c10::List<std::optional<at::Scalar>>(), std::string_view());
  const auto* from = product.const_data_ptr<float>();
  for (std::int64_t row = 0; row < m; ++row, from += n, c += stride_c) {
    if (beta == 0) {  // which may hold anything
      std::copy_n(from, n, c);
      continue;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      c[i] = from[i] + beta * c[i];
    }
  }
  return true;
}

}  // namespace

bool prefersLinearProducts() {
#if defined(__x86_64__)
  static const bool preferred = __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
#else
  constexpr bool preferred = false;
#endif
  return answerOfTests().value_or(preferred);
}

void setPrefersLinearProducts(std::optional<bool> answer) { answerOfTests() = answer; }

template <class T>
void multiply(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a,
              std::int64_t stride_a, const T* b, std::int64_t stride_b, T beta, T* c, std::int64_t stride_c) {
  constexpr std::int64_t kLargest = std::numeric_limits<int>::max();
  const auto gemm = blasGemm<T>();
  if (gemm == nullptr || std::max({m, n, k, stride_a, stride_b, stride_c}) > kLargest) {
    at::Tensor result = stored(c, false, m, n, stride_c);
    result.copy_(
        at::addmm(result, stored(a, transpose_a, m, k, stride_a), stored(b, transpose_b, k, n, stride_b), beta));
    return;
  }
  if (m == 0 || n == 0) {
    return;
  }
  if constexpr (std::is_same_v<T, float>) {
    if (!transpose_a && transpose_b && stride_b == k && usesLinear(m, n, k) &&
        multiplyLinear(m, n, k, a, stride_a, b, beta, c, stride_c)) {
      return;
    }
  }
  // BLAS counts by columns: what it sees of a row-major matrix is the transpose, and the factors change places.
  const char kind_a = transpose_a ? 'T' : 'N';
  const char kind_b = transpose_b ? 'T' : 'N';
  const auto narrow = [](std::int64_t value) { return static_cast<int>(std::max<std::int64_t>(value, 1)); };
  const auto rows = static_cast<int>(m);
  const auto columns = static_cast<int>(n);
  const auto inner = static_cast<int>(k);
  const int lda = narrow(stride_a);
  const int ldb = narrow(stride_b);
  const int ldc = narrow(stride_c);
  const T one = 1;
  gemm(&kind_b, &kind_a, &columns, &rows, &inner, &one, b, &ldb, a, &lda, &beta, c, &ldc);
}

template <class T>
void symmetricProduct(const T* data, std::int64_t data_stride, std::int64_t dim, std::int64_t count, T* out,
                      std::int64_t stride) {
  // Narrower panels cost GEMM more than they save; less so where the sums are long.
  const std::int64_t panel_width = count >= 1024 ? 36 : 64;
  const std::int64_t panels = std::clamp<std::int64_t>(dim / panel_width, 1, 8);
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    const std::int64_t begin = dim * panel / panels;
    const std::int64_t end = dim * (panel + 1) / panels;
    multiply(true, false, end - begin, dim - begin, count, data + begin, data_stride, data + begin, data_stride, T(0),
             out + begin * stride + begin, stride);
  }
}

template void multiply<float>(bool, bool, std::int64_t, std::int64_t, std::int64_t, const float*, std::int64_t,
                              const float*, std::int64_t, float, float*, std::int64_t);
template void multiply<double>(bool, bool, std::int64_t, std::int64_t, std::int64_t, const double*, std::int64_t,
                               const double*, std::int64_t, double, double*, std::int64_t);
template void symmetricProduct<float>(const float*, std::int64_t, std::int64_t, std::int64_t, float*, std::int64_t);
template void symmetricProduct<double>(const double*, std::int64_t, std::int64_t, std::int64_t, double*, std::int64_t);

}  // namespace torchext
