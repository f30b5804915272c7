// Operations that other instruction sets do in one instruction.

inline F32 load(const BFloat16* from) {
  return reinterpret<F32>(__builtin_convertvector(load_bits<U16>(from), U32) << 16);
}

inline bool any_above(F32 x, float limit) { return max_of(x) > limit; }

inline F32 round_to_integer(F32 x) {
  const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds numbers below 2^22
  return (x + magic) - magic;
}

// p * 2^n, or 0 if x is below -126. n is an integer up to 128; p makes the result a normal number or infinity.
inline F32 times_power_of_two(F32 p, F32 n, F32 x) {
  const U32 exponents = reinterpret<U32>(__builtin_convertvector(n, I32)) << 23;
  const F32 product = reinterpret<F32>(reinterpret<U32>(p) + exponents);
  return x < -126.0f ? F32{} : product;
}

inline F32 rough_inverse(F32 x) { return 1.0f / x; }
