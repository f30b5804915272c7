// The operations after a product, while its sums are still in registers.

// As precise as a result of type T needs: the approximations below are within 7e-5 and 6e-5 of it.
template <class T>
inline F32 silu(F32 x) {
  if constexpr (sizeof(T) == sizeof(float)) return x / (1.0f + exp(-x));
  return x * rough_inverse(1.0f + exp2<4>(min(splat(128.0f), x * -kLog2E)));
}

template <class T>
void store_columns(T* out, F32 x, int64_t count) {
  if (count >= kLanes) {
    store(out, x);
  } else {
    for (int64_t i = 0; i < count; ++i) narrow(x[i], out + i);
  }
}
