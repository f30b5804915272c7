// Rounds weights to groups of whole numbers with a scale.

// The nearest float16, ties to even. x is finite; what is too large becomes infinite.
inline uint16_t to_half(float x) {
  const uint32_t bits = reinterpret<uint32_t>(x), sign = bits >> 16 & 0x8000;
  const float magnitude = reinterpret<float>(bits & 0x7fffffff);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14f)  // subnormal: the last bit is 2^-24
    return static_cast<uint16_t>(sign | (reinterpret<uint32_t>(magnitude + 0.5f) - reinterpret<uint32_t>(0.5f)));
  const uint32_t rebased = (bits & 0x7fffffff) - (112u << 23);
  return static_cast<uint16_t>(sign | ((rebased + 0xfff + (rebased >> 13 & 1)) >> 13));
}

inline float from_half(uint16_t bits) {
  const float magnitude = reinterpret<float>(static_cast<uint32_t>(bits & 0x7fff) << 13) * 0x1p112f;
  return bits & 0x8000 ? -magnitude : magnitude;
}

// As floats; the numbers are zeros if the scale is.
inline F32 levels(const float* x, float inverse, float lowest) {
  return min(splat(lowest - 1), max(splat(-lowest), round_to_integer(load(x) * inverse)));
}

inline float inverse_of(float scale) { return scale == 0 ? 0.0f : 1.0f / scale; }

inline float squared_error(const float* x, float scale, float lowest) {
  const float inverse = inverse_of(scale);
  F32 sums = {};
  for (int i = 0; i < kGroup; i += kLanes) {
    const F32 difference = levels(x + i, inverse, lowest) * scale - load(x + i);
    sums += difference * difference;
  }
  return sum_of(sums);
}

inline void round_group(const GroupedRoundingArgs& a, const float* x, uint8_t* values, uint16_t* scale) {
  const auto lowest = static_cast<float>(a.lowest);
  float extreme = 0, best_error = __builtin_inff();
  for (int i = 0; i < kGroup; ++i)
    if (__builtin_fabsf(x[i]) > __builtin_fabsf(extreme)) extreme = x[i];
  *scale = 0;
  for (int64_t i = 0; i < a.num_factors; ++i) {
    const uint16_t candidate = to_half(extreme / (-lowest * a.factors[i]));
    const float error = squared_error(x, from_half(candidate), lowest);
    if (error < best_error) {
      best_error = error;
      *scale = candidate;
    }
  }
  const float inverse = inverse_of(from_half(*scale));
  for (int i = 0; i < kGroup; i += kLanes) {
    const F32 rounded = levels(x + i, inverse, lowest) + lowest;
    for (int lane = 0; lane < kLanes; ++lane) values[i + lane] = static_cast<uint8_t>(rounded[lane]);
  }
}

inline void round_groups(const GroupedRoundingArgs& a, int64_t first_output, int64_t end_output) {
  const int64_t groups = divide_up(a.inputs, kGroup);
  for (int64_t output = first_output; output < end_output; ++output)
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = output * a.inputs + group * kGroup, left = a.inputs - group * kGroup;
      const auto count = static_cast<size_t>(left < kGroup ? left : kGroup);
      float x[kGroup] = {};
      uint8_t values[kGroup];
      __builtin_memcpy(x, a.weight + at, count * sizeof(float));
      round_group(a, x, values, a.scales + output * groups + group);
      __builtin_memcpy(a.values + at, values, count);
    }
}
