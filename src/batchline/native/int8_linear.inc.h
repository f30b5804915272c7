// Int8 linear layers: rows to bytes, sums of integers, and scales, bias and activation before the sums leave the
// registers. The including file gives `round_to_int`, `dot_fours` and the offset that its bytes of x carry.

constexpr int kVectors = kPanel / kLanes;  // vectors in a panel

typedef uint8_t U8 __attribute__((vector_size(kLanes)));

constexpr int32_t kNotFinite = 0x7f800000;   // from here on a float without its sign is infinite or no number
constexpr float kSmallest = 1e-30f;          // a row of smaller numbers counts as zero
constexpr float kLargestInt8 = 127.0f;       // -128 is not used: it would have no opposite

// The largest magnitude of a row; what is not finite outweighs everything else.
template <class T>
float largest_magnitude(const T* x, int64_t dim) {
  I32 largest = {};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const I32 bits = reinterpret<I32>(load(x + i)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result = largest[lane] > result ? largest[lane] : result;
  for (; i < dim; ++i) {
    const int32_t bits = reinterpret<int32_t>(widen(x[i])) & 0x7fffffff;
    result = bits > result ? bits : result;
  }
  return reinterpret<float>(result);
}

// x becomes bytes between -127 and 127 times *scale. A row that is not finite becomes zeros with a scale that is no
// number, which its outputs then are too.
template <class T>
void quantize_row(const T* x, int64_t dim, int64_t padded, uint8_t* bytes, float* scale) {
  const float largest = largest_magnitude(x, dim);
  const bool is_finite = reinterpret<int32_t>(largest) < kNotFinite;
  const float range = largest > kSmallest ? largest : kSmallest;
  *scale = is_finite ? range / kLargestInt8 : __builtin_nanf("");
  if (!is_finite) {
    __builtin_memset(bytes, kOffset, static_cast<size_t>(padded));
    return;
  }
  const float factor = kLargestInt8 / range;
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    store_bits(bytes + i, __builtin_convertvector(round_to_int(load(x + i) * factor) + kOffset, U8));
  for (; i < dim; ++i) bytes[i] = static_cast<uint8_t>(round_to_int(splat(widen(x[i]) * factor))[0] + kOffset);
  for (; i < padded; ++i) bytes[i] = 0;  // the weights are zero there
}

template <class T>
void quantize(const Int8LinearArgs& a, const QuantizedRows& to, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row)
    quantize_row(static_cast<const T*>(a.x) + row * a.x_stride, a.inputs, a.num_fours() * kFour, to.row(row),
                 &to.scale(row));
}

// Scales, bias, activation and rounding of one row's sums; panel: the first one's number.
template <class T, int kPanels>
void finish_int8_row(const Int8LinearArgs& a, const I32* sums, float row_scale, int64_t row, int64_t panel) {
  F32 x[kPanels * kVectors];
  for (int c = 0; c < kPanels * kVectors; ++c) {
    const int64_t column = panel * kPanel + c * kLanes;
    x[c] = __builtin_convertvector(sums[c], F32) * row_scale * load(a.scales + column);
    if (a.bias != nullptr) x[c] += load(a.bias + column);
  }
  int64_t first = panel * kPanel;
  int count = kPanels * kVectors;
  if constexpr (kPanels == 2) {
    if (a.is_gated) {
      for (int v = 0; v < kVectors; ++v) x[v] = silu(x[v]) * x[kVectors + v];
      first /= 2;
      count = kVectors;
    }
  }
  T* out = static_cast<T*>(a.out) + row * a.out_stride;
  for (int c = 0; c < count; ++c) store_columns(out + first + c * kLanes, x[c], a.outputs - first - c * kLanes);
}

template <class T, int kRows, int kPanels>
void int8_tile(const Int8LinearArgs& a, const QuantizedRows& rows, int64_t row, int64_t panel) {
  constexpr int vectors = kPanels * kVectors;
  const int64_t panel_bytes = a.num_fours() * kPanel * kFour;
  I32 sums[kRows][vectors];
  for (int c = 0; c < vectors; ++c) {
    const I32 start = load_bits<I32>(a.sums + panel * kPanel + c * kLanes) * -kOffset;
    for (int r = 0; r < kRows; ++r) sums[r][c] = start;
  }
  const uint8_t* x = rows.row(row);
  const int8_t* b = a.panels + panel * panel_bytes;
  for (int64_t k = 0; k < a.num_fours(); ++k) {
    I32 columns[vectors];
#pragma GCC unroll 16
    for (int c = 0; c < vectors; ++c)
      columns[c] = load_bits<I32>(b + c / kVectors * panel_bytes + (k * kPanel + c % kVectors * kLanes) * kFour);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const I32 four = I32{} + load_bits<int32_t>(x + r * rows.stride + k * kFour);
#pragma GCC unroll 16
      for (int c = 0; c < vectors; ++c) sums[r][c] = dot_fours(sums[r][c], four, columns[c]);
    }
  }
  for (int r = 0; r < kRows; ++r) finish_int8_row<T, kPanels>(a, sums[r], rows.scale(row + r), row + r, panel);
}

template <class T, int kPanels>
void int8_columns(const Int8LinearArgs& a, const QuantizedRows& rows, const LinearItem& item, int64_t panel) {
  int64_t row = item.first_row;
  for (; row + kTileRows <= item.end_row; row += kTileRows) int8_tile<T, kTileRows, kPanels>(a, rows, row, panel);
  if constexpr (kTileRows > 4)
    for (; row + 4 <= item.end_row; row += 4) int8_tile<T, 4, kPanels>(a, rows, row, panel);
  for (; row < item.end_row; ++row) int8_tile<T, 1, kPanels>(a, rows, row, panel);
}

template <class T>
void int8_linear(const Int8LinearArgs& a, const QuantizedRows& rows, const LinearItem& item) {
  int64_t panel = item.first_panel;
  for (; panel + 2 <= item.end_panel; panel += 2) int8_columns<T, 2>(a, rows, item, panel);  // gate and up go together
  if (panel < item.end_panel) int8_columns<T, 1>(a, rows, item, panel);
}

template <class T>
constexpr TypedInt8Kernels typed_int8_kernels() {
  return {quantize<T>, int8_linear<T>};
}
