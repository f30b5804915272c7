// For x86 processors with AVX2 and no int8 instructions.
#if defined(__x86_64__)
#include <immintrin.h>

#include "int8_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace batchline {
namespace {

constexpr int kLanes = 8;
constexpr int kTileRows = 2;  // rows times two panels of sums stay in registers
constexpr int kOffset = 0;

#include "simd.inc.h"
#include "generic.inc.h"
#include "avx2.inc.h"
#include "bfloat16.inc.h"
#include "vector_math.inc.h"
#include "epilogue.inc.h"

// Sums of two products fit into 16 bits, because no factor is beyond 127.
inline I32 dot_fours(I32 sum, I32 a, I32 b) {
  const __m256i x = reinterpret<__m256i>(a), y = reinterpret<__m256i>(b);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(y, x));
  return sum + reinterpret<I32>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#include "int8_linear.inc.h"

}  // namespace

const Int8Kernels kInt8Avx2Kernels = {typed_int8_kernels<float>(), typed_int8_kernels<BFloat16>()};

}  // namespace batchline

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
