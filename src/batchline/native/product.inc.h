// The one inner loop of all products: a few rows of broadcast pairs against a few panels of columns. Each instruction set
// defines `fused`: sum + a * b, always in the same way. Compilers fuse the two in some loops and not in others (GCC since
// 13), and then a row's result would depend on the rows beside it.

constexpr int kVectors = kPanel / kLanes;  // vectors in a panel

template <class T>
struct Pairs;

template <>
struct Pairs<float> {
  static F32 broadcast(const float* a) { return splat(*a); }
  static F32 multiply_add(F32 sum, F32 a, F32 b) { return fused(sum, a, b); }
  static F32 columns(const float* b) { return load_bits<F32>(b); }
};

template <>
struct Pairs<BFloat16> {
  static U32 broadcast(const BFloat16* a) { return U32{} + load_bits<uint32_t>(a); }
  static F32 multiply_add(F32 sum, U32 a, U32 b) { return dot_pairs(sum, a, b); }
  static U32 columns(const BFloat16* b) { return load_bits<U32>(b); }

  static U32 broadcast_first(const BFloat16* a) { return U32{} + a->bits; }
  static U32 first_of_columns(const BFloat16* b) { return columns(b) & 0xffffu; }
};

template <int kRows, int kPanels>
struct Sums {
  F32 at[kRows][kPanels * kVectors];
};

// sums[r] += a[r] * b, over `depth` pairs. a: rows of pairs, a_stride elements apart. b: for each panel its first pair
// row; the next one is b_step elements on. meanwhile(k) is called at each step.
template <class T, int kRows, int kPanels, class Meanwhile>
inline __attribute__((always_inline)) void multiply(Sums<kRows, kPanels>& sums, const T* a, int64_t a_stride,
                                                    const T* const* b, int64_t b_step, int64_t depth,
                                                    Meanwhile meanwhile) {
  using P = Pairs<T>;
  for (int64_t k = 0; k < depth; ++k) {
    meanwhile(k);
    decltype(P::columns(b[0])) columns[kPanels * kVectors];
#pragma GCC unroll 16
    for (int c = 0; c < kPanels * kVectors; ++c)
      columns[c] = P::columns(b[c / kVectors] + k * b_step + c % kVectors * kLanes * kPair<T>);
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r) {
      const auto value = P::broadcast(a + r * a_stride + k * kPair<T>);
#pragma GCC unroll 16
      for (int c = 0; c < kPanels * kVectors; ++c)
        sums.at[r][c] = P::multiply_add(sums.at[r][c], value, columns[c]);
    }
  }
}

// The same for one pair of which only the first number counts. The second one is not multiplied, not even with 0, and a's
// is not read.
template <class T, int kRows, int kPanels>
inline void multiply_first_of_pair(Sums<kRows, kPanels>& sums, const T* a, int64_t a_stride, const T* const* b) {
  using P = Pairs<T>;
  for (int c = 0; c < kPanels * kVectors; ++c) {
    const auto columns = P::first_of_columns(b[c / kVectors] + c % kVectors * kLanes * kPair<T>);
    for (int r = 0; r < kRows; ++r)
      sums.at[r][c] = P::multiply_add(sums.at[r][c], P::broadcast_first(a + r * a_stride), columns);
  }
}
