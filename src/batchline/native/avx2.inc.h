// Operations that AVX2 with FMA does in one instruction.

inline F32 fused(F32 sum, F32 a, F32 b) {
  return reinterpret<F32>(
      _mm256_fmadd_ps(reinterpret<__m256>(a), reinterpret<__m256>(b), reinterpret<__m256>(sum)));
}

inline I32 round_to_int(F32 x) { return reinterpret<I32>(_mm256_cvtps_epi32(reinterpret<__m256>(x))); }
