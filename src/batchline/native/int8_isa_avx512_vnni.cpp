// For x86 processors with AVX-512 and its int8 dot product.
#if defined(__x86_64__)
#include <immintrin.h>

#include "int8_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#endif

namespace batchline {
namespace {

constexpr int kLanes = 16;
constexpr int kTileRows = 12;  // rows times two panels of sums stay in registers
constexpr int kOffset = 128;  // the dot product takes bytes of x without a sign

#include "simd.inc.h"
#include "avx512.inc.h"
#include "bfloat16.inc.h"
#include "vector_math.inc.h"
#include "epilogue.inc.h"

inline I32 round_to_int(F32 x) { return reinterpret<I32>(_mm512_maskz_cvtps_epi32(kAllLanes, reinterpret<__m512>(x))); }

inline I32 dot_fours(I32 sum, I32 a, I32 b) {
  return reinterpret<I32>(_mm512_dpbusd_epi32(reinterpret<__m512i>(sum), reinterpret<__m512i>(a), reinterpret<__m512i>(b)));
}

#include "int8_linear.inc.h"

}  // namespace

const Int8Kernels kInt8Avx512VnniKernels = {typed_int8_kernels<float>(), typed_int8_kernels<BFloat16>()};

}  // namespace batchline

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
