// Layer normalisation of a residual sum, and GELU: what stands between an encoder's products.

// x = normalised (x + delta) * weight + bias, for one row. delta may be null. The sum is rounded to the element type
// first, as it would be in memory.
template <class T>
void layer_norm_row(T* x, const T* delta, const T* weight, const T* bias, int64_t dim, float eps) {
  F32 sums = {};
  float tail_sum = 0;
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    if (delta != nullptr) store(x + i, load(x + i) + load(delta + i));
    sums += load(x + i);
  }
  for (; i < dim; ++i) {
    if (delta != nullptr) narrow(widen(x[i]) + widen(delta[i]), x + i);
    tail_sum += widen(x[i]);
  }
  const float mean = (sum_of(sums) + tail_sum) / static_cast<float>(dim);
  F32 squares = {};
  float tail_squares = 0;
  for (i = 0; i + kLanes <= dim; i += kLanes) {
    const F32 centred = load(x + i) - mean;
    squares += centred * centred;
  }
  for (; i < dim; ++i) tail_squares += (widen(x[i]) - mean) * (widen(x[i]) - mean);
  const float factor = 1.0f / __builtin_sqrtf((sum_of(squares) + tail_squares) / static_cast<float>(dim) + eps);
  for (i = 0; i + kLanes <= dim; i += kLanes)
    store(x + i, (load(x + i) - mean) * factor * load(weight + i) + load(bias + i));
  for (; i < dim; ++i) narrow((widen(x[i]) - mean) * factor * widen(weight[i]) + widen(bias[i]), x + i);
}

// The error function to 1.5e-7: formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
inline F32 erf(F32 x) {
  const F32 magnitude = max(x, -x);
  const F32 t = 1.0f / (1.0f + magnitude * 0.3275911f);
  F32 p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const F32 result = 1.0f - p * t * exp2(magnitude * magnitude * -kLog2E);
  return x < 0.0f ? -result : result;
}

inline F32 gelu(F32 x) { return x * 0.5f * (1.0f + erf(x * 0.70710678118654752f)); }

template <class T>
void gelu_row(T* x, int64_t dim) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(x + i, gelu(load(x + i)));
  for (; i < dim; ++i) narrow(gelu(splat(widen(x[i])))[0], x + i);
}
