// What some instruction sets do in one instruction, for those that do not.

inline F32 load(const BFloat16* from) {
  return reinterpret<F32>(__builtin_convertvector(load_bits<U16>(from), U32) << 16);
}

inline bool any_above(F32 x, float limit) { return max_of(x) > limit; }

inline F32 round_to_integer(F32 x) {
  const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds numbers below 2^22
  return (x + magic) - magic;
}

// x * 2^n for an integer n between -126 and 127, where the result is a normal number.
inline F32 times_power_of_two(F32 x, F32 n) {
  return reinterpret<F32>(reinterpret<I32>(x) + (__builtin_convertvector(n, I32) << 23));
}
