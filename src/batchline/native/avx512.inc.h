// Operations that AVX-512 does in one instruction. The masked forms avoid GCC's warning about undefined sources.

constexpr __mmask16 kAllLanes = 0xffff;

// GCC widens its own vectors in halves.
inline F32 load(const BFloat16* from) {
  return reinterpret<F32>(reinterpret<U32>(_mm512_maskz_cvtepu16_epi32(kAllLanes, load_bits<__m256i>(from))) << 16);
}

inline bool any_above(F32 x, float limit) {
  return _mm512_cmp_ps_mask(reinterpret<__m512>(x), _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}

inline F32 round_to_integer(F32 x) {
  return reinterpret<F32>(_mm512_maskz_roundscale_ps(kAllLanes, reinterpret<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}

// p * 2^n, or 0 if x is below -126.
inline F32 times_power_of_two(F32 p, F32 n, F32 x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(reinterpret<__m512>(x), _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return reinterpret<F32>(_mm512_maskz_scalef_ps(is_normal, reinterpret<__m512>(p), reinterpret<__m512>(n)));
}

// 1 / x to 2^-14 of the result; 0 for infinity.
inline F32 rough_inverse(F32 x) { return reinterpret<F32>(_mm512_maskz_rcp14_ps(kAllLanes, reinterpret<__m512>(x))); }

inline F32 fused(F32 sum, F32 a, F32 b) {
  return reinterpret<F32>(
      _mm512_fmadd_ps(reinterpret<__m512>(a), reinterpret<__m512>(b), reinterpret<__m512>(sum)));
}
