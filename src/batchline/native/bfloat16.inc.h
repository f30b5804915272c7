// bfloat16 for instruction sets without it.

inline void store(BFloat16* to, F32 x) {
  const U32 bits = reinterpret<U32>(x);
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  store_bits(to, __builtin_convertvector(x == x ? rounded : U32{} + kPlainNan, U16));
}

// The product of pairs: both halves are widened and multiplied as floats.
inline F32 dot_pairs(F32 sum, U32 a, U32 b) {
  const F32 even = reinterpret<F32>(a << 16) * reinterpret<F32>(b << 16);
  const U32 upper = U32{} + 0xffff0000u;
  return sum + even + reinterpret<F32>(a & upper) * reinterpret<F32>(b & upper);
}
