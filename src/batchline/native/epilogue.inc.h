// The operations after a product, while its sums are still in registers.

inline F32 silu(F32 x) { return x / (1.0f + exp(-x)); }

template <class T>
void store_columns(T* out, F32 x, int64_t count) {
  if (count >= kLanes) {
    store(out, x);
  } else {
    for (int64_t i = 0; i < count; ++i) narrow(x[i], out + i);
  }
}
