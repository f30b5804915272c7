// Exponentials. Each instruction set's file must define `round_to_integer` and `times_power_of_two` first.

// 2^x for x up to 128, to about one unit in the last place of a float, or with kTerms = 4 to 5e-5 of the result, which is
// enough if the result is rounded to bfloat16. Below -126 it is 0, at 128 infinity, for NaN it is NaN. The integer part
// goes into the exponent, the rest through its Taylor polynomial.
template <int kTerms = 6>
inline F32 exp2(F32 x) {
  static_assert(kTerms == 4 || kTerms == 6);
  const F32 n = round_to_integer(x);
  const F32 r = x - n;
  F32 p = splat(9.6181291076e-3f);
  if constexpr (kTerms == 6) p = (r * 1.5403530393e-4f + 1.3333558146e-3f) * r + p;
  p = p * r + 5.5504108665e-2f;
  p = p * r + 2.4022650696e-1f;
  p = p * r + 6.9314718056e-1f;
  p = p * r + 1.0f;
  return times_power_of_two(p, n, x);
}

constexpr float kLog2E = 1.44269504088896341f;

inline F32 exp(F32 x) { return exp2(min(splat(128.0f), x * kLog2E)); }

inline F32 tanh(F32 x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }
