// For any processor: vectors of four numbers, which every important compiler target has.
#include "grouped_kernels.h"

namespace batchline {
namespace {

constexpr int kLanes = 4;
constexpr int kTileRows = 2;  // rows times two panels of sums stay in registers
constexpr int kBytesStart = 0;  // `dot_bytes` subtracts 128 itself

#include "simd.inc.h"
#include "generic.inc.h"
#include "portable.inc.h"
#include "bfloat16.inc.h"
#include "vector_math.inc.h"
#include "epilogue.inc.h"
#include "half.inc.h"

typedef int16_t I16 __attribute__((vector_size(kLanes * 4)));  // twice as many lanes

// Even and odd bytes as 16-bit numbers, both with a sign. The sum of two products fits into 16 bits, because no number of x
// is beyond 127.
inline I32 dot_signed(I32 sum, I32 weights, I32 x) {
  const I16 a = reinterpret<I16>(weights), b = reinterpret<I16>(x);
  const I32 pairs = reinterpret<I32>((a << 8 >> 8) * (b << 8 >> 8) + (a >> 8) * (b >> 8));
  return sum + (pairs << 16 >> 16) + (pairs >> 16);
}

inline I32 dot_unsigned(I32 sum, I32 weights, I32 x) { return dot_signed(sum, weights, x); }  // weights are below 64

inline I32 dot_bytes(I32 sum, I32 weights, I32 x) {
  return dot_signed(sum, weights ^ static_cast<int32_t>(0x80808080), x);
}

#include "grouped_rounding.inc.h"
#include "grouped_linear.inc.h"

}  // namespace

const GroupedKernels kGroupedPortableKernels = grouped_kernels();

}  // namespace batchline
