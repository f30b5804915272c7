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

// 16 rows of 16 numbers of 4 bytes: rows become columns.
inline void transpose(__m512i* rows) {
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_maskz_unpacklo_epi32(kAllLanes, rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_maskz_unpackhi_epi32(kAllLanes, rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int half = 0; half < 2; ++half) {
      fours[i + 2 * half] = _mm512_maskz_unpacklo_epi64(0xff, pairs[i + half], pairs[i + 2 + half]);
      fours[i + 2 * half + 1] = _mm512_maskz_unpackhi_epi64(0xff, pairs[i + half], pairs[i + 2 + half]);
    }
  }
  // fours[4 * i + c]: in each quarter q, column 4 * q + c of rows 4 * i to 4 * i + 3
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_maskz_shuffle_i32x4(kAllLanes, fours[c], fours[4 + c], 0x44);
    const __m512i low23 = _mm512_maskz_shuffle_i32x4(kAllLanes, fours[8 + c], fours[12 + c], 0x44);
    const __m512i high01 = _mm512_maskz_shuffle_i32x4(kAllLanes, fours[c], fours[4 + c], 0xee);
    const __m512i high23 = _mm512_maskz_shuffle_i32x4(kAllLanes, fours[8 + c], fours[12 + c], 0xee);
    rows[c] = _mm512_maskz_shuffle_i32x4(kAllLanes, low01, low23, 0x88);
    rows[4 + c] = _mm512_maskz_shuffle_i32x4(kAllLanes, low01, low23, 0xdd);
    rows[8 + c] = _mm512_maskz_shuffle_i32x4(kAllLanes, high01, high23, 0x88);
    rows[12 + c] = _mm512_maskz_shuffle_i32x4(kAllLanes, high01, high23, 0xdd);
  }
}
