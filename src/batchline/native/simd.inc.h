// Vectors of kLanes floats, on the compiler's vector types. Included by each instruction set's file inside its own
// unnamed namespace, after it has fixed kLanes: the same source is compiled once per instruction set.

typedef float F32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I32 __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));
typedef uint16_t U16 __attribute__((vector_size(kLanes * 2)));

constexpr float kMasked = -__builtin_inff();  // weighs exactly 0
constexpr float kLowest = -__FLT_MAX__;       // finite, so that a difference of the two is no NaN

// A number of rows that is known to the compiler.
template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

// Calls tile(Count of rows) for all rows in order: kMost at a time, and then in as few tiles as possible of at most four.
template <int kMost, class Tile>
inline void in_row_tiles(int64_t rows, Tile tile) {
  for (; rows >= kMost; rows -= kMost) tile(Count<kMost>{});
  if constexpr (kMost > 4)
    for (; rows >= 4; rows -= 4) tile(Count<4>{});
  if constexpr (kMost > 3)
    if (rows == 3) tile(Count<3>{});
  if constexpr (kMost > 2)
    if (rows == 2) tile(Count<2>{});
  if (rows == 1) tile(Count<1>{});
}

template <class V>
inline V load_bits(const void* from) {
  V bits;
  __builtin_memcpy(&bits, from, sizeof(V));
  return bits;
}

template <class V>
inline void store_bits(void* to, V bits) {
  __builtin_memcpy(to, &bits, sizeof(V));
}

template <class To, class From>
inline To reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

inline F32 splat(float x) { return F32{} + x; }

inline I32 lane_numbers() {
  I32 numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// If one of two numbers is NaN, b is the result. Pass a limit as a, so that NaN stays NaN.
inline F32 max(F32 a, F32 b) { return a > b ? a : b; }
inline F32 min(F32 a, F32 b) { return a < b ? a : b; }

// Reductions fold the upper half of the lanes onto the lower one until one lane is left.
template <int kCount>
struct Lanes {
  typedef float Vector __attribute__((vector_size(kCount * 4)));
  typedef typename Lanes<kCount / 2>::Vector Half;

  static Half lower(Vector x) { return load_bits<Half>(&x); }
  static Half upper(Vector x) { return load_bits<Half>(reinterpret_cast<const char*>(&x) + sizeof(Half)); }
  static float sum(Vector x) { return Lanes<kCount / 2>::sum(lower(x) + upper(x)); }
  static float max(Vector x) {
    const Half a = lower(x), b = upper(x);
    return Lanes<kCount / 2>::max(a > b ? a : b);
  }
};

template <>
struct Lanes<2> {
  typedef float Vector __attribute__((vector_size(8)));

  static float sum(Vector x) { return x[0] + x[1]; }
  static float max(Vector x) { return x[0] > x[1] ? x[0] : x[1]; }
};

inline float sum_of(F32 x) { return Lanes<kLanes>::sum(x); }
inline float max_of(F32 x) { return Lanes<kLanes>::max(x); }

// bfloat16 is the upper half of a float; rounding is to nearest, ties to even. Every NaN becomes the plain NaN, whose bits
// rounding cannot turn into those of a number.
constexpr uint32_t kPlainNan = 0x7fc0;

inline float widen(BFloat16 x) { return reinterpret<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(float x) { return x; }

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {
  const uint32_t bits = reinterpret<uint32_t>(x);
  to->bits = static_cast<uint16_t>(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : kPlainNan);
}

inline F32 load(const float* from) { return load_bits<F32>(from); }

inline void store(float* to, F32 x) { store_bits(to, x); }
