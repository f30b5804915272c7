// For x86 processors without AVX-512, but with the 256-bit int8 dot product.
#if defined(__x86_64__)
#include <immintrin.h>

#include "int8_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avxvnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avxvnni,avx2,fma")
#endif

namespace batchline {
namespace {

constexpr int kLanes = 8;
constexpr int kTileRows = 2;  // rows times two panels of sums stay in registers
constexpr int kOffset = 128;  // the dot product takes bytes of x without a sign

#include "simd.inc.h"
#include "generic.inc.h"
#include "avx2.inc.h"
#include "bfloat16.inc.h"
#include "vector_math.inc.h"
#include "epilogue.inc.h"

inline I32 dot_fours(I32 sum, I32 a, I32 b) {
  return reinterpret<I32>(_mm256_dpbusd_avx_epi32(reinterpret<__m256i>(sum), reinterpret<__m256i>(a), reinterpret<__m256i>(b)));
}

#include "int8_linear.inc.h"

}  // namespace

const Int8Kernels kInt8AvxVnniKernels = {typed_int8_kernels<float>(), typed_int8_kernels<BFloat16>()};

}  // namespace batchline

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
