// Picks wider vector instructions at run time, so that one binary is portable and fast.
//
// The loops are written once, as plain C++ that the compiler vectorises. Each is compiled twice: for the baseline of
// the target, and (x86-64 only) for AVX2 with F16C; cpuHasAvx2() chooses. onBestIsa() does the same for a whole kernel,
// with AVX-512 as a third choice. Other processors run the baseline, which on
// AArch64 is NEON already. No IFUNCs: they run before the sanitizers do.
// onLoopIsa() makes the choice for a loop that gives a result.
//
// Loops give the same bits whichever way they run; whole kernels do up to rounding, since AVX-512 fuses a product with
// the sum that follows it.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define TORCHEXT_X86_DISPATCH 1
#include <cpuid.h>
#include <immintrin.h>
#define TORCHEXT_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#define TORCHEXT_TARGET_AVX512 \
  __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#else
#define TORCHEXT_X86_DISPATCH 0
#endif

#define TORCHEXT_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace torchext::cpu {

// From the narrowest; each processor has those up to its best.
enum class Isa { kBaseline, kAvx2, kAvx512 };

#if TORCHEXT_X86_DISPATCH
inline bool cpuHasAvx2() {
  static const bool has = [] {
    constexpr unsigned kF16c = 1U << 29U;  // CPUID leaf 1, ECX; not a name every compiler's builtin knows
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0 && __builtin_cpu_supports("avx2");
  }();
  return has;
}

inline bool cpuHasAvx512() {
  static const bool has = cpuHasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}

namespace detail {

template <class Kernel, class... Args>
TORCHEXT_TARGET_AVX512 void runAvx512(const Args&... args) {
  Kernel::run(args...);
}

template <class Kernel, class... Args>
TORCHEXT_TARGET_AVX2 auto runAvx2(const Args&... args) {
  return Kernel::run(args...);
}

}  // namespace detail
#endif

inline Isa bestIsa() {
#if TORCHEXT_X86_DISPATCH
  return cpuHasAvx512() ? Isa::kAvx512 : cpuHasAvx2() ? Isa::kAvx2 : Isa::kBaseline;
#else
  return Isa::kBaseline;
#endif
}

// Kernel::run(args...), compiled once for each instruction set. run and what it calls must be TORCHEXT_ALWAYS_INLINE:
// what is not inlined runs with the baseline's instructions.
template <class Kernel, class... Args>
void onIsa([[maybe_unused]] Isa isa, const Args&... args) {
#if TORCHEXT_X86_DISPATCH
  if (isa == Isa::kAvx512) {
    return detail::runAvx512<Kernel>(args...);
  }
  if (isa == Isa::kAvx2) {
    return detail::runAvx2<Kernel>(args...);
  }
#endif
  Kernel::run(args...);
}

template <class Kernel, class... Args>
void onBestIsa(const Args&... args) {
  onIsa<Kernel>(bestIsa(), args...);
}

// Loop::run(args...) likewise, with AVX2 at most: no product is fused with a sum, and the bits are the baseline's.
template <class Loop, class... Args>
auto onLoopIsa(const Args&... args) {
#if TORCHEXT_X86_DISPATCH
  if (cpuHasAvx2()) {
    return detail::runAvx2<Loop>(args...);
  }
#endif
  return Loop::run(args...);
}

}  // namespace torchext::cpu
