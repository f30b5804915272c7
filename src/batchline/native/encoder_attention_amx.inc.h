// Attention within a sequence in bfloat16 on AMX: scores of up to 16 queries against all keys, then weights times values.

template <>
constexpr HeadLayout kHeadLayout<BFloat16> = {kTileRowCount, kTileInputs};

// Registers 0 to 3 are sums, 4 the queries, 5 keys, 6 weights, 7 values.
constexpr TileShapes head_shapes(int64_t queries) {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) shapes.set(i, i == 5 || i == 7 ? kTileRowCount : queries);
  return shapes;
}

// Keys in panels: each pair of numbers of 16 keys side by side, as `pack_keys` does it, by transposing 16 pairs at a time.
inline void pack_tiles_of_keys(const HeadMemory<BFloat16>& memory, const BFloat16* keys, int64_t stride) {
  for (int64_t first = 0; first < memory.padded_keys; first += kPanel) {
    BFloat16* panel = memory.key_panels + first * memory.key_dim;
    for (int64_t i = 0; i < memory.key_dim; i += kTileInputs) {
      __m512i rows[kPanel];
      for (int64_t j = 0; j < kPanel; ++j)
        rows[j] = first + j < memory.keys ? _mm512_loadu_si512(keys + (first + j) * stride + i) : _mm512_setzero_si512();
      transpose(rows);
      for (int j = 0; j < kPanel; ++j) _mm512_store_si512(panel + i * kPanel + j * kPanelRow, rows[j]);
    }
  }
}

// Stores the registers of sums side by side. row_bytes: from row to row.
template <int kPanels>
void store_panels(float* to, int64_t row_bytes) {
  _tile_stored(0, to, row_bytes);
  _tile_stored(1, to + kPanel, row_bytes);
  if constexpr (kPanels > 2) {
    _tile_stored(2, to + 2 * kPanel, row_bytes);
    _tile_stored(3, to + 3 * kPanel, row_bytes);
  }
}

// Raw scores of the queries against kPanels panels of keys.
template <int kPanels>
void score_tiles(const HeadMemory<BFloat16>& memory, const BFloat16* queries, int64_t stride, int64_t first_key) {
  const auto query_bytes = stride * static_cast<int64_t>(sizeof(BFloat16));
  const auto score_bytes = memory.padded_keys * static_cast<int64_t>(sizeof(float));
  const int64_t panel_size = memory.key_dim * kPanel;
  const BFloat16* keys = memory.key_panels + first_key * memory.key_dim;
  clear_sums();
  for (int64_t i = 0; i < memory.key_dim; i += kTileInputs, keys += kTileInputs * kPanel) {
    _tile_loadd(4, queries + i, query_bytes);
    _tile_loadd(5, keys, kTileBytes);
    TILE_PRODUCT(0, 4, 5);
    _tile_loadd(5, keys + panel_size, kTileBytes);
    TILE_PRODUCT(1, 4, 5);
    if constexpr (kPanels > 2) {
      _tile_loadd(5, keys + 2 * panel_size, kTileBytes);
      TILE_PRODUCT(2, 4, 5);
      _tile_loadd(5, keys + 3 * panel_size, kTileBytes);
      TILE_PRODUCT(3, 4, 5);
    }
  }
  store_panels<kPanels>(memory.scores + first_key, score_bytes);
}

// Weights times values, for kPanels panels of the values' numbers.
template <int kPanels>
void weigh_tiles(const HeadMemory<BFloat16>& memory, int64_t column) {
  constexpr int64_t kKeys = kTileInputs;
  const auto weight_bytes = memory.padded_keys * static_cast<int64_t>(sizeof(BFloat16));
  const auto row_bytes = memory.value_dim * static_cast<int64_t>(sizeof(float));  // of sums, and of pairs of values
  const BFloat16* values = memory.value_panels + column * kPair<BFloat16>;
  clear_sums();
  for (int64_t key = 0; key < memory.padded_keys; key += kKeys, values += kKeys * memory.value_dim) {
    _tile_loadd(6, memory.weights + key, weight_bytes);
    _tile_loadd(7, values, row_bytes);
    TILE_PRODUCT(0, 6, 7);
    _tile_loadd(7, values + kPanelRow, row_bytes);
    TILE_PRODUCT(1, 6, 7);
    if constexpr (kPanels > 2) {
      _tile_loadd(7, values + 2 * kPanelRow, row_bytes);
      TILE_PRODUCT(2, 6, 7);
      _tile_loadd(7, values + 3 * kPanelRow, row_bytes);
      TILE_PRODUCT(3, 6, 7);
    }
  }
  store_panels<kPanels>(memory.sums + column, row_bytes);
}

// Calls run(first, Count of panels) for an even number of panels, four at a time where there are as many.
template <class Run>
void for_tiles(int64_t count, Run run) {
  int64_t first = 0;
  for (; first + 4 * kPanel <= count; first += 4 * kPanel) run(first, Count<4>{});
  if (first < count) run(first, Count<2>{});
}

// Up to 16 queries against all keys.
inline void attend_tiles(const HeadMemory<BFloat16>& memory, const BFloat16* queries, int64_t num_queries, int64_t stride,
                         BFloat16* out, int64_t out_stride, float factor) {
  for_tiles(memory.padded_keys, [&](int64_t key, auto panels) { score_tiles<panels.value>(memory, queries, stride, key); });
  float totals[kTileRowCount];
  for (int64_t row = 0; row < num_queries; ++row) totals[row] = weigh_scores(memory, row, factor);
  finish_stores();
  for_tiles(memory.value_dim, [&](int64_t column, auto panels) { weigh_tiles<panels.value>(memory, column); });
  for (int64_t row = 0; row < num_queries; ++row) {
    const F32 scale = splat(1.0f / totals[row]);
    const float* sums = memory.sums + row * memory.value_dim;
    for (int64_t i = 0; i < memory.value_dim; i += kLanes) store(out + row * out_stride + i, load(sums + i) * scale);
  }
}

// Heads whose numbers do not fill tiles are computed without AMX.
template <>
void attend_within<BFloat16>(const HeadMemory<BFloat16>& memory, const BFloat16* query, const BFloat16* key,
                             const BFloat16* value, int64_t stride, BFloat16* out, int64_t out_stride, float scale) {
  if (memory.key_dim % kTileInputs > 0) {
    attend_in_registers(memory, query, key, value, stride, out, out_stride, scale);
    return;
  }
  pack_tiles_of_keys(memory, key, stride);
  pack_values(memory, value, stride);
  static constexpr TileShapes kWhole = head_shapes(kTileRowCount);
  Tiles tiles(kWhole);
  for (int64_t row = 0; row < memory.keys; row += kTileRowCount) {
    const int64_t count = std::min(kTileRowCount, memory.keys - row);
    if (count < kTileRowCount) tiles.reshape(head_shapes(count));
    attend_tiles(memory, query + row * stride, count, stride, out + row * out_stride, out_stride, scale * kLog2E);
  }
}
