// Attention in bfloat16 on AMX, for tiles of queries that have enough rows: scores of 16 rows against a tile of keys, and
// their weights times its values.

constexpr int64_t kMinRows = 8;  // fewer are computed as quickly without AMX

constexpr TileShapes attention_shapes() {
  TileShapes shapes;
  for (int i = 0; i < 4; ++i) shapes.set(i, kTileRowCount);  // of scores for a panel of keys, or of weighted values
  shapes.set(4, kTileRowCount);                              // queries
  shapes.set(5, kTileRowCount);                                 // keys
  shapes.set(6, kTileRowCount, kPanel * static_cast<int64_t>(sizeof(BFloat16)));  // weights of a panel of keys
  shapes.set(7, kPanel / kPair<BFloat16>);                                            // values of a panel of keys
  return shapes;
}

template <>
int64_t with_padding<BFloat16>(int64_t rows) {
  const int64_t padded = round_up(rows, kTileRows);
  return rows < kMinRows ? padded : std::max(padded, round_up(rows, kTileRowCount));
}

// scores: (16, kKeyTile).
inline void score_block(const Tile<BFloat16>& tile, int64_t row, const AttentionArgs& a, const KeyTile<BFloat16>& keys,
                        float* scores) {
  static_assert(kKeyPanels == 4, "one register for each panel's scores");
  const BFloat16* queries = tile.queries + row * tile.key_dim;
  const auto query_bytes = tile.key_dim * static_cast<int64_t>(sizeof(BFloat16));
  const int64_t pair_row = a.cache.block_size * kPair<BFloat16>;
  const auto key_bytes = pair_row * static_cast<int64_t>(sizeof(BFloat16));
  clear_sums();
  for (int64_t i = 0; i < tile.key_dim; i += kTileInputs) {
    const int64_t first = i / kPair<BFloat16> * pair_row;
    _tile_loadd(4, queries + i, query_bytes);
    _tile_loadd(5, keys.keys[0] + first, key_bytes);
    TILE_PRODUCT(0, 4, 5);
    _tile_loadd(5, keys.keys[1] + first, key_bytes);
    TILE_PRODUCT(1, 4, 5);
    _tile_loadd(5, keys.keys[2] + first, key_bytes);
    TILE_PRODUCT(2, 4, 5);
    _tile_loadd(5, keys.keys[3] + first, key_bytes);
    TILE_PRODUCT(3, 4, 5);
  }
  constexpr int64_t stride = kKeyTile * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, scores, stride);
  _tile_stored(1, scores + kPanel, stride);
  _tile_stored(2, scores + 2 * kPanel, stride);
  _tile_stored(3, scores + 3 * kPanel, stride);
}

// sums += weights * values, for 16 rows and one or four panels of the value's numbers.
template <int kPanels>
void add_values_block(const Tile<BFloat16>& tile, int64_t row, const KeyTile<BFloat16>& keys, int64_t column) {
  float* sums = tile.sums + row * tile.value_dim + column;
  const auto sum_bytes = tile.value_dim * static_cast<int64_t>(sizeof(float));  // also of a row of pairs of values
  constexpr int64_t weight_bytes = kKeyTile * static_cast<int64_t>(sizeof(BFloat16));
  _tile_loadd(0, sums, sum_bytes);
  if constexpr (kPanels > 1) {
    _tile_loadd(1, sums + kPanel, sum_bytes);
    _tile_loadd(2, sums + 2 * kPanel, sum_bytes);
    _tile_loadd(3, sums + 3 * kPanel, sum_bytes);
  }
  for (int panel = 0; panel < kKeyPanels; ++panel) {
    const BFloat16* values = keys.values[panel] + column * kPair<BFloat16>;
    _tile_loadd(6, tile.weights + panel * kPanel, weight_bytes);
    _tile_loadd(7, values, sum_bytes);
    TILE_PRODUCT(0, 6, 7);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, values + kPanelRow, sum_bytes);
      TILE_PRODUCT(1, 6, 7);
      _tile_loadd(7, values + 2 * kPanelRow, sum_bytes);
      TILE_PRODUCT(2, 6, 7);
      _tile_loadd(7, values + 3 * kPanelRow, sum_bytes);
      TILE_PRODUCT(3, 6, 7);
    }
  }
  _tile_stored(0, sums, sum_bytes);
  if constexpr (kPanels > 1) {
    _tile_stored(1, sums + kPanel, sum_bytes);
    _tile_stored(2, sums + 2 * kPanel, sum_bytes);
    _tile_stored(3, sums + 3 * kPanel, sum_bytes);
  }
}

inline void attend_block(Tile<BFloat16>& tile, int64_t row, const AttentionArgs& a, const KeyTile<BFloat16>& keys,
                         int64_t first_key) {
  alignas(64) float scores[kTileRowCount * kKeyTile];
  score_block(tile, row, a, keys, scores);
  const int64_t rows = std::min(kTileRowCount, tile.rows - row);
  for (int64_t r = 0; r < rows; ++r) {
    F32 of_row[kKeyPanels];
    for (int c = 0; c < kKeyPanels; ++c) of_row[c] = load(scores + r * kKeyTile + c * kLanes);
    const float factor = weigh_row(tile, row + r, of_row, a, first_key, tile.weights + r * kKeyTile);
    if (factor == 1) continue;
    float* sums = tile.sums + (row + r) * tile.value_dim;
    for (int64_t c = 0; c < tile.value_dim; c += kLanes) store(sums + c, load(sums + c) * factor);
  }
  finish_stores();
  int64_t column = 0;
  for (; column + 4 * kPanel <= tile.value_dim; column += 4 * kPanel) add_values_block<4>(tile, row, keys, column);
  for (; column < tile.value_dim; column += kPanel) add_values_block<1>(tile, row, keys, column);
}

// A tile of keys that goes beyond the context may hold NaN there, which must not be multiplied even by 0.
template <>
void attend_tile<BFloat16>(Tile<BFloat16>& tile, const AttentionArgs& a, const KeyTile<BFloat16>& keys,
                           int64_t first_key, int64_t filled, const KeyTile<BFloat16>& next) {
  if (tile.rows < kMinRows || filled < kKeyTile || a.cache.key_dim % kTileInputs > 0) {
    attend_in_registers(tile, a, keys, first_key, filled, next);
    return;
  }
  static constexpr TileShapes kShapes = attention_shapes();
  const Tiles tiles(kShapes);  // after the stores to the queries and sums
  for (int64_t row = 0; row < tile.rows; row += kTileRowCount) attend_block(tile, row, a, keys, first_key);
}
