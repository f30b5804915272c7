// For any processor: vectors of four numbers, which every important compiler target has.
#include "int8_kernels.h"

namespace batchline {
namespace {

constexpr int kLanes = 4;
constexpr int kTileRows = 2;  // rows times two panels of sums stay in registers
constexpr int kOffset = 0;

#include "simd.inc.h"
#include "generic.inc.h"
#include "portable.inc.h"
#include "bfloat16.inc.h"
#include "vector_math.inc.h"
#include "epilogue.inc.h"

typedef int16_t I16 __attribute__((vector_size(kLanes * 4)));  // twice as many lanes

// Even and odd bytes as 16-bit numbers. A product, and the sum of two products, also fit, because no factor is beyond 127.
inline I32 dot_fours(I32 sum, I32 a, I32 b) {
  const I16 x = reinterpret<I16>(a), y = reinterpret<I16>(b);
  const I32 pairs = reinterpret<I32>((x << 8 >> 8) * (y << 8 >> 8) + (x >> 8) * (y >> 8));
  return sum + (pairs << 16 >> 16) + (pairs >> 16);
}

#include "int8_linear.inc.h"

}  // namespace

const Int8Kernels kInt8PortableKernels = {typed_int8_kernels<float>(), typed_int8_kernels<BFloat16>()};

}  // namespace batchline
