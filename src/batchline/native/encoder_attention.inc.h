// Attention in both directions within one sequence, straight from its queries, keys and values: no cache.
//
// Works on one head at a time: its keys and values are put into panels (see product.inc.h); then, for a few queries at a
// time, all scores, their weights, and the weighted values are computed. Scores are in units of log 2.

// How many queries are computed together, at most, and to a multiple of what keys are padded (one of kPanel).
struct HeadLayout {
  int64_t queries, keys;
};

template <class T>
constexpr HeadLayout kHeadLayout = {kTileRows, kPanel};

// A head's working memory. Keys are padded to whole panels or more; the padding's scores are masked, its values zero.
template <class T>
struct HeadMemory {
  int64_t keys, padded_keys, key_dim, value_dim;  // value_dim: padded to whole panels
  float* scores;    // (queries, padded_keys)
  float* sums;      // (queries, value_dim)
  T* key_panels;    // (padded_keys / kPanel, key_dim / pair, kPanel, pair)
  T* value_panels;  // (padded_keys / pair, value_dim, pair)
  T* weights;       // (queries, padded_keys)

  HeadMemory(void* scratch, int64_t num_keys, int64_t head_dim)
      : keys(num_keys),
        padded_keys(round_up(num_keys, kHeadLayout<T>.keys)),
        key_dim(head_dim),
        value_dim(round_up(head_dim, kPanel)) {
    scores = static_cast<float*>(scratch);
    sums = scores + kQueries * padded_keys;
    key_panels = reinterpret_cast<T*>(sums + kQueries * value_dim);
    value_panels = key_panels + padded_keys * key_dim;
    weights = value_panels + padded_keys * value_dim;
  }

  size_t bytes() const {
    const int64_t floats = kQueries * (padded_keys + value_dim);
    const int64_t elements = padded_keys * (key_dim + value_dim + kQueries);
    return static_cast<size_t>(floats) * sizeof(float) + static_cast<size_t>(elements) * sizeof(T);
  }

 private:
  static constexpr int64_t kQueries = kHeadLayout<T>.queries;
};

// keys: (keys, key_dim), rows `stride` apart. key_dim is a multiple of a pair.
template <class T>
void pack_keys(const HeadMemory<T>& memory, const T* keys, int64_t stride) {
  constexpr int pair = kPair<T>;
  const int64_t head_dim = memory.key_dim, not_whole = memory.keys / kPanel * kPanel;
  __builtin_memset(memory.key_panels + not_whole * head_dim, 0,
                   static_cast<size_t>((memory.padded_keys - not_whole) * head_dim) * sizeof(T));
  for (int64_t j = 0; j < memory.keys; ++j) {
    T* to = memory.key_panels + j / kPanel * kPanel * head_dim + j % kPanel * pair;
    for (int64_t i = 0; i < head_dim; i += pair)
      __builtin_memcpy(to + i * kPanel, keys + j * stride + i, pair * sizeof(T));
  }
}

// Two rows of bfloat16 as pairs with one number of each row; a row of floats unchanged.
inline void pair_rows(BFloat16* to, const BFloat16* const* rows, int64_t count) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    const U32 even = __builtin_convertvector(load_bits<U16>(rows[0] + c), U32);
    const U32 odd = __builtin_convertvector(load_bits<U16>(rows[1] + c), U32);
    store_bits(to + 2 * c, even | odd << 16);
  }
  for (; c < count; ++c) {
    to[2 * c] = rows[0][c];
    to[2 * c + 1] = rows[1][c];
  }
}

inline void pair_rows(float* to, const float* const* rows, int64_t count) {
  __builtin_memcpy(to, rows[0], static_cast<size_t>(count) * sizeof(float));
}

// Positions beyond the keys become zero.
template <class T>
void pack_values(const HeadMemory<T>& memory, const T* values, int64_t stride) {
  constexpr int pair = kPair<T>;
  const int64_t head_dim = memory.key_dim, last = memory.keys - 1;
  T* to = memory.value_panels;
  __builtin_memset(to, 0, static_cast<size_t>(memory.padded_keys * memory.value_dim) * sizeof(T));
  for (int64_t j = 0; j < memory.keys; j += pair, to += memory.value_dim * pair) {
    const T* rows[] = {values + j * stride, values + (j < last ? j + 1 : j) * stride};
    pair_rows(to, rows, head_dim);
    if (j + pair <= memory.keys) continue;
    for (int64_t c = 0; c < head_dim; ++c) to[pair * c + 1] = {};  // a last row has no partner
  }
}

template <class T, int kRows, int kPanels>
void score_panels(const HeadMemory<T>& memory, const T* queries, int64_t stride, int64_t first_key) {
  Sums<kRows, kPanels> sums = {};
  const T* b[kPanels];
  for (int p = 0; p < kPanels; ++p) b[p] = memory.key_panels + (first_key + p * kPanel) * memory.key_dim;
  multiply<T>(sums, queries, stride, b, kPanel * kPair<T>, memory.key_dim / kPair<T>, [](int64_t) {});
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kPanels * kVectors; ++c)
      store(memory.scores + r * memory.padded_keys + first_key + c * kLanes, sums.at[r][c]);
}

// Turns one row's scores into weights, and returns their sum. factor: from scores to units of log 2; positive.
template <class T>
float weigh_scores(const HeadMemory<T>& memory, int64_t row, float factor) {
  float* scores = memory.scores + row * memory.padded_keys;
  T* weights = memory.weights + row * memory.padded_keys;
  for (int64_t key = memory.keys; key < memory.padded_keys; ++key) scores[key] = kMasked;
  F32 largest = load(scores);
  for (int64_t key = kLanes; key < memory.padded_keys; key += kLanes) largest = max(largest, load(scores + key));
  const float maximum = max_of(largest) * factor;
  F32 total = {};
  for (int64_t key = 0; key < memory.padded_keys; key += kLanes) {
    const F32 power = fused(splat(-maximum), load(scores + key), splat(factor));
    const F32 weight = exp2<sizeof(T) < sizeof(float) ? 4 : 6>(power);
    total += weight;
    store(weights + key, weight);
  }
  return sum_of(total);
}

template <class T, int kRows, int kPanels>
void weighted_values(const HeadMemory<T>& memory, int64_t column) {
  Sums<kRows, kPanels> sums = {};
  const T* b[kPanels];
  for (int p = 0; p < kPanels; ++p) b[p] = memory.value_panels + (column + p * kPanel) * kPair<T>;
  multiply<T>(sums, memory.weights, memory.padded_keys, b, memory.value_dim * kPair<T>,
              memory.padded_keys / kPair<T>, [](int64_t) {});
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kPanels * kVectors; ++c)
      store(memory.sums + r * memory.value_dim + column + c * kLanes, sums.at[r][c]);
}

// kRows queries against all keys. out: (kRows, head_dim), rows out_stride apart. factor: as in `weigh_scores`.
template <class T, int kRows>
void attend_queries(const HeadMemory<T>& memory, const T* queries, int64_t stride, T* out, int64_t out_stride,
                    float factor) {
  int64_t key = 0, column = 0;
  for (; key + kKeyPanels * kPanel <= memory.padded_keys; key += kKeyPanels * kPanel)
    score_panels<T, kRows, kKeyPanels>(memory, queries, stride, key);
  for (; key < memory.padded_keys; key += kPanel) score_panels<T, kRows, 1>(memory, queries, stride, key);
  float totals[kRows];
  for (int r = 0; r < kRows; ++r) totals[r] = weigh_scores(memory, r, factor);
  for (; column + 2 * kPanel <= memory.value_dim; column += 2 * kPanel) weighted_values<T, kRows, 2>(memory, column);
  if (column < memory.value_dim) weighted_values<T, kRows, 1>(memory, column);
  for (int r = 0; r < kRows; ++r) {
    const float* sums = memory.sums + r * memory.value_dim;
    const float inverse = 1.0f / totals[r];
    for (int64_t i = 0; i < memory.key_dim; i += kLanes)
      store_columns(out + r * out_stride + i, load(sums + i) * inverse, memory.key_dim - i);
  }
}

// query, key, value: (keys, head_dim), rows `stride` apart; out likewise, out_stride apart.
template <class T>
void attend_in_registers(const HeadMemory<T>& memory, const T* query, const T* key, const T* value, int64_t stride, T* out,
                         int64_t out_stride, float scale) {
  pack_keys(memory, key, stride);
  pack_values(memory, value, stride);
  int64_t row = 0;
  const auto run = [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    for (; row + kRows <= memory.keys; row += kRows)
      attend_queries<T, kRows>(memory, query + row * stride, stride, out + row * out_stride, out_stride, scale * kLog2E);
  };
  run(Count<kTileRows>{});
  if constexpr (kTileRows > 3) run(Count<3>{});
  run(Count<1>{});
}

template <class T>
void attend_within(const HeadMemory<T>& memory, const T* query, const T* key, const T* value, int64_t stride, T* out,
                   int64_t out_stride, float scale) {
  attend_in_registers(memory, query, key, value, stride, out, out_stride, scale);
}
