// For x86 processors with AVX-512 and its int8 dot product.
#if defined(__x86_64__)
#include <immintrin.h>

#include "grouped_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#endif

namespace batchline {
namespace {

#include "grouped_avx512.inc.h"

}  // namespace

const GroupedKernels kGroupedAvx512VnniKernels = grouped_kernels();

}  // namespace batchline

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
