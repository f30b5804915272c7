// Linear layers in bfloat16 on AMX: two blocks of 16 rows against two panels at a time, so that each tile is used twice
// once it is loaded. Up to 16 rows go against four panels. All sums leave the registers as floats, and are finished like
// those of `linear_tile`.

constexpr int64_t kRowBytesOfItem = 768 * 1024;  // an item's rows stay in the second-level cache beside its panels
constexpr int64_t kMaxAmxRows = 512;
constexpr int64_t kPairInputs = kPair<BFloat16>;
constexpr int64_t kTileInputs = kTilePairs * kPairInputs;
constexpr int64_t kPanelRow = kPanel * kPairInputs;  // numbers of a panel in a row of a tile

// Sums are registers 0 to 3: of the two panels of the first block, then of the second one; or of four panels.
constexpr TileShapes linear_shapes(int64_t first_rows, int64_t second_rows) {
  TileShapes shapes;
  for (int i = 0; i < 4; ++i) shapes.set(i, i < 2 || second_rows == 0 ? first_rows : second_rows);
  shapes.set(4, first_rows);
  shapes.set(5, second_rows == 0 ? first_rows : second_rows);
  shapes.set(6, kTilePairs);
  shapes.set(7, kTilePairs);
  return shapes;
}

inline const BFloat16* panel_of(const LinearArgs& a, int64_t panel) {
  return static_cast<const BFloat16*>(a.panels) + panel * divide_up(a.inputs, kPairInputs) * kPanelRow;
}

inline const BFloat16* x_row(const LinearArgs& a, int64_t row) {
  return static_cast<const BFloat16*>(a.x) + row * a.x_stride;
}

// The inputs after the last whole tile.
template <int kPanels>
void add_last_inputs(const LinearArgs& a, Sums<1, kPanels>& sums, int64_t row, int64_t panel) {
  const int64_t first = a.inputs / kTileInputs * kTileInputs, pairs = (a.inputs - first) / kPairInputs;
  const BFloat16 *x = x_row(a, row) + first, *b[kPanels];
  for (int p = 0; p < kPanels; ++p) b[p] = panel_of(a, panel + p) + first * kPanel;
  multiply<BFloat16>(sums, x, a.x_stride, b, kPanelRow, pairs, [](int64_t) {});
  for (int p = 0; p < kPanels; ++p) b[p] += pairs * kPanelRow;
  if (a.inputs % kPairInputs > 0) multiply_first_of_pair<BFloat16>(sums, x + pairs * kPairInputs, a.x_stride, b);
}

// sums: (rows, kPanels * kPanel).
template <int kPanels>
void finish_rows(const LinearArgs& a, const float* sums, int64_t row, int64_t end_row, int64_t panel) {
  const int64_t columns = (panel + kPanels) / (a.is_gated ? 2 : 1) * kPanel;
  const bool is_whole = columns <= a.outputs && (kPanels % 2 == 0 || !a.is_gated);
  for (; row < end_row; ++row, sums += kPanels * kPanel) {
    Sums<1, kPanels> of_row;
    for (int c = 0; c < kPanels; ++c) of_row.at[0][c] = load(sums + c * kPanel);
    if (a.inputs % kTileInputs > 0) add_last_inputs(a, of_row, row, panel);
    if (is_whole) {
      finish_whole<BFloat16>(a, of_row, row, panel);
    } else {
      finish_row<BFloat16, kPanels>(a, of_row.at[0], row, panel);
    }
  }
}

// More than 16 rows, at most 32, against one or two panels. ahead: weights to fetch meanwhile.
template <int kPanels>
void multiply_two_blocks(const LinearArgs& a, int64_t row, int64_t panel, const BFloat16* ahead, float* sums) {
  const BFloat16 *x = x_row(a, row), *second_x = x + kTileRowCount * a.x_stride;
  const BFloat16 *b = panel_of(a, panel), *second_b = panel_of(a, panel + 1);
  const size_t x_bytes = static_cast<size_t>(a.x_stride) * sizeof(BFloat16);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k + kTileInputs <= a.inputs; k += kTileInputs) {
    _tile_loadd(6, b + k * kPanel, kTileBytes);
    _tile_loadd(4, x + k, x_bytes);
    _tile_loadd(5, second_x + k, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kPanels == 2) {
      _tile_loadd(7, second_b + k * kPanel, kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (ahead == nullptr) continue;
    for (int64_t line = 0; line < kPanels * kTilePairs; ++line, ahead += kPanelRow)
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
  }
  constexpr int64_t stride = kPanels * kPanel * static_cast<int64_t>(sizeof(float));
  float* second_sums = sums + kTileRowCount * kPanels * kPanel;
  _tile_stored(0, sums, stride);
  _tile_stored(2, second_sums, stride);
  if constexpr (kPanels == 2) {
    _tile_stored(1, sums + kPanel, stride);
    _tile_stored(3, second_sums + kPanel, stride);
  }
}

// At most 16 rows against one, two or four panels.
template <int kPanels>
void multiply_block(const LinearArgs& a, int64_t row, int64_t panel, const BFloat16* ahead, float* sums) {
  const BFloat16 *x = x_row(a, row), *b = panel_of(a, panel);
  const int64_t panel_size = panel_of(a, 1) - panel_of(a, 0);
  const size_t x_bytes = static_cast<size_t>(a.x_stride) * sizeof(BFloat16);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k + kTileInputs <= a.inputs; k += kTileInputs, b += kTilePairs * kPanelRow) {
    _tile_loadd(4, x + k, x_bytes);
    _tile_loadd(6, b, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, b + panel_size, kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kPanels > 2) {
      _tile_loadd(6, b + 2 * panel_size, kTileBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, b + 3 * panel_size, kTileBytes);
      _tile_dpbf16ps(3, 4, 7);
    }
    if (ahead == nullptr) continue;
    for (int64_t line = 0; line < kPanels * kTilePairs; ++line, ahead += kPanelRow)
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
  }
  constexpr int64_t stride = kPanels * kPanel * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, sums, stride);
  if constexpr (kPanels > 1) _tile_stored(1, sums + kPanel, stride);
  if constexpr (kPanels > 2) {
    _tile_stored(2, sums + 2 * kPanel, stride);
    _tile_stored(3, sums + 3 * kPanel, stride);
  }
}

// All of an item's panels, some at a time, by run(panel, Count of panels, weights to fetch meanwhile). Weights come from
// memory once, with the first rows.
template <int kMost, class Run>
void for_panels(const LinearArgs& a, const LinearItem& item, bool fetches, Run run) {
  int64_t panel = item.first_panel;
  const auto step = [&](auto count) {
    const int64_t ahead = panel + kPanelsAhead;
    run(panel, count, fetches && ahead + count.value <= a.num_panels() ? panel_of(a, ahead) : nullptr);
    panel += count.value;
  };
  while (panel + kMost <= item.end_panel) step(Count<kMost>{});
  if constexpr (kMost > 2)
    while (panel + 2 <= item.end_panel) step(Count<2>{});
  while (panel < item.end_panel) step(Count<1>{});
}

template <>
void linear<BFloat16>(const LinearArgs& a, const LinearItem& item) {
  constexpr int64_t two_blocks = 2 * kTileRowCount;
  alignas(64) float sums[two_blocks * 2 * kPanel];
  const int64_t rows = item.end_row - item.first_row, whole_end = item.first_row + rows / two_blocks * two_blocks;
  const int64_t rest = item.end_row - whole_end;
  const auto blocks = [&](int64_t first_row, int64_t end_row) {
    for_panels<2>(a, item, first_row == item.first_row, [&](int64_t panel, auto count, const BFloat16* ahead) {
      for (int64_t row = first_row; row < end_row; row += two_blocks, ahead = nullptr) {
        multiply_two_blocks<count.value>(a, row, panel, ahead, sums);
        finish_rows<count.value>(a, sums, row, std::min(row + two_blocks, end_row), panel);
      }
    });
  };
  static constexpr TileShapes kWhole = linear_shapes(kTileRowCount, kTileRowCount);
  Tiles tiles(kWhole);
  blocks(item.first_row, whole_end);
  if (rest > kTileRowCount) {
    tiles.reshape(linear_shapes(kTileRowCount, rest - kTileRowCount));
    blocks(whole_end, item.end_row);
  } else if (rest > 0) {
    tiles.reshape(linear_shapes(rest, 0));
    for_panels<4>(a, item, rows == rest, [&](int64_t panel, auto count, const BFloat16* ahead) {
      multiply_block<count.value>(a, whole_end, panel, ahead, sums);
      finish_rows<count.value>(a, sums, whole_end, item.end_row, panel);
    });
  }
}

template <>
int64_t rows_at_once<BFloat16>(const LinearArgs& a) {
  const int64_t fitting = kRowBytesOfItem / (a.inputs * static_cast<int64_t>(sizeof(BFloat16)));
  return std::clamp<int64_t>(fitting / (2 * kTileRowCount) * (2 * kTileRowCount), kMaxItemRows, kMaxAmxRows);
}
