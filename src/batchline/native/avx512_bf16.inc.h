// Operations on bfloat16 that AVX512-BF16 does in one instruction.

inline void store(BFloat16* to, F32 x) { store_bits(to, _mm512_cvtneps_pbh(reinterpret<__m512>(x))); }

// The products of a pair are added without rounding between them; subnormal numbers count as zero.
inline F32 dot_pairs(F32 sum, U32 a, U32 b) {
  return reinterpret<F32>(_mm512_dpbf16_ps(reinterpret<__m512>(sum), reinterpret<__m512bh>(a), reinterpret<__m512bh>(b)));
}
