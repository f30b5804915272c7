// Products of pairs for instruction sets without a bfloat16 dot product: widen both halves and multiply as floats.

inline F32 dot_pairs(F32 sum, U32 a, U32 b) {
  const F32 even = reinterpret<F32>(a << 16) * reinterpret<F32>(b << 16);
  const U32 upper = U32{} + 0xffff0000u;
  return sum + even + reinterpret<F32>(a & upper) * reinterpret<F32>(b & upper);
}
