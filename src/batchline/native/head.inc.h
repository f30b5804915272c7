// The language-model head. Its weight stays as the model has it, so the two sides of the product change places: the
// weight's rows are multiplied like the rows of a linear layer's x, and the step's rows are packed in panels.

// From one token's sums in an item's block to the next one's: an odd number of cache lines, because a column of the block
// would take only a few sets of the first-level cache otherwise.
constexpr int64_t kBlockStride = kHeadItemRows + kPanel;

// So few rows are multiplied number by number, along the weight's rows. Panels would be mostly empty.
constexpr int64_t kDotRows = 8;

template <class T>
int64_t panel_numbers(int64_t inputs) {
  return divide_up(inputs, kPair<T>) * kPanel * kPair<T>;
}

template <class T>
void pack_all_rows(const HeadArgs& a, void* panels) {
  constexpr int pair = kPair<T>;
  const int64_t size = panel_numbers<T>(a.inputs);
  __builtin_memset(panels, 0, static_cast<size_t>(divide_up(a.rows, kPanel) * size) * sizeof(T));
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* from = static_cast<const T*>(a.x) + row * a.x_stride;
    T* to = static_cast<T*>(panels) + row / kPanel * size + row % kPanel * pair;
    for (int64_t i = 0; i < a.inputs; ++i) to[i / pair * kPanel * pair + i % pair] = from[i];
  }
}

template <class T>
void pack_rows(const HeadArgs& a, void* panels) {
  if (a.rows > kDotRows) pack_all_rows<T>(a, panels);
}

// The item as one of a linear layer: the weight's rows in the place of x.
template <class T>
LinearArgs as_linear(const HeadArgs& a, const void* panels) {
  LinearArgs linear = {};
  linear.x = a.weight;
  linear.x_stride = a.weight_stride;
  linear.panels = panels;
  linear.rows = a.vocab;
  linear.inputs = a.inputs;
  return linear;
}

// Sums of a few tokens and panels, at their place in the item's block.
template <class T, int kRows, int kPanels>
void multiply_tokens(const LinearArgs& a, int64_t token, int64_t panel, float* to) {
  constexpr int pair = kPair<T>;
  Sums<kRows, kPanels> sums = {};
  const T *x = static_cast<const T*>(a.x) + token * a.x_stride, *b[kPanels];
  for (int p = 0; p < kPanels; ++p) b[p] = static_cast<const T*>(a.panels) + (panel + p) * panel_numbers<T>(a.inputs);
  const int64_t pairs = a.inputs / pair;
  multiply<T>(sums, x, a.x_stride, b, kPanel * pair, pairs, [](int64_t) {});
  if constexpr (pair > 1) {
    if (a.inputs % pair > 0) {
      for (int p = 0; p < kPanels; ++p) b[p] += pairs * kPanel * pair;
      multiply_first_of_pair<T>(sums, x + pairs * pair, a.x_stride, b);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kPanels * kVectors; ++c) store(to + r * kBlockStride + c * kLanes, sums.at[r][c]);
}

template <class T, int kPanels>
void multiply_all_tokens(const LinearArgs& a, const LinearItem& item, int64_t panel, float* to) {
  constexpr int kTokens = kTileRows * kLinearPanels / kPanels;  // as many sums as the registers hold
  int64_t token = item.first_row;
  for (; token + kTokens <= item.end_row; token += kTokens, to += kTokens * kBlockStride)
    multiply_tokens<T, kTokens, kPanels>(a, token, panel, to);
  for (; token < item.end_row; ++token, to += kBlockStride) multiply_tokens<T, 1, kPanels>(a, token, panel, to);
}

// block: (tokens, kBlockStride) sums of the item.
template <class T>
void multiply_block_of_tokens(const LinearArgs& a, const LinearItem& item, float* block) {
  int64_t panel = item.first_panel;
  const auto place = [&] { return block + (panel - item.first_panel) * kPanel; };
  for (; panel + kLinearPanels <= item.end_panel; panel += kLinearPanels)
    multiply_all_tokens<T, kLinearPanels>(a, item, panel, place());
  for (; panel < item.end_panel; ++panel) multiply_all_tokens<T, 1>(a, item, panel, place());
}

// Logits of kRows rows and one or two tokens. to: of the first one; rows are `stride` apart.
template <class T, int kRows, int kTokens>
void dot_tokens(const HeadArgs& a, int64_t row, int64_t token, float* to, int64_t stride) {
  using P = Pairs<T>;
  constexpr int64_t kStep = kLanes * kPair<T>;
  const T *x = static_cast<const T*>(a.x) + row * a.x_stride, *bias = static_cast<const T*>(a.bias);
  const T* weight = static_cast<const T*>(a.weight) + token * a.weight_stride;
  F32 sums[kTokens][kRows] = {};
  int64_t i = 0;
  for (; i + kStep <= a.inputs; i += kStep)
    for (int t = 0; t < kTokens; ++t)
      for (int r = 0; r < kRows; ++r)
        sums[t][r] = P::multiply_add(sums[t][r], P::columns(x + r * a.x_stride + i), P::columns(weight + t * a.weight_stride + i));
  for (int t = 0; t < kTokens; ++t)
    for (int r = 0; r < kRows; ++r) {
      float sum = sum_of(sums[t][r]);
      for (int64_t last = i; last < a.inputs; ++last)
        sum += widen(x[r * a.x_stride + last]) * widen(weight[t * a.weight_stride + last]);
      to[r * stride + t] = bias == nullptr ? sum : sum + widen(bias[token + t]);
    }
}

template <class T, int kRows>
void dot_all_tokens(const HeadArgs& a, const HeadItem& item, int64_t row, float* to, int64_t stride) {
  int64_t token = item.first;
  for (; token + 2 <= item.end; token += 2, to += 2) dot_tokens<T, kRows, 2>(a, row, token, to, stride);
  if (token < item.end) dot_tokens<T, kRows, 1>(a, row, token, to, stride);
}

// to: (rows, stride), the item's logits.
template <class T>
void dot_all_rows(const HeadArgs& a, const HeadItem& item, float* to, int64_t stride) {
  int64_t row = 0;
  for (; row + 4 <= a.rows; row += 4) dot_all_tokens<T, 4>(a, item, row, to + row * stride, stride);
  for (; row < a.rows; ++row) dot_all_tokens<T, 1>(a, item, row, to + row * stride, stride);
}

// scratch: kDotRows * kHeadItemTokens floats.
template <class T>
void head_of_few(const HeadArgs& a, const HeadItem& item, float* scratch) {
  if (a.logits != nullptr) {
    dot_all_rows<T>(a, item, a.logits + item.first, a.vocab);
    return;
  }
  dot_all_rows<T>(a, item, scratch, kHeadItemTokens);
  for (int64_t row = 0; row < a.rows; ++row, scratch += kHeadItemTokens) {
    float largest = -__builtin_inff();
    int64_t token = -1;
    for (int64_t i = item.first; i < item.end; ++i)
      if (scratch[i - item.first] > largest) {
        largest = scratch[i - item.first];
        token = i;
      }
    item.largest[row] = largest;
    item.tokens[row] = static_cast<int32_t>(token);
  }
}

// The largest of each row's sums in an item's block. The first of equal ones counts.
template <class T>
void find_largest(const HeadArgs& a, const HeadItem& item, const float* block) {
  const T* bias = static_cast<const T*>(a.bias);
  for (int64_t row = 0; row < item.end_row - item.first_row; row += kLanes) {
    const float* sums = block + row;
    F32 largest = splat(-__builtin_inff());
    I32 tokens = I32{} - 1;
    for (int64_t i = item.first; i < item.end; ++i, sums += kBlockStride) {
      const F32 logits = bias == nullptr ? load(sums) : load(sums) + splat(widen(bias[i]));
      tokens = logits > largest ? I32{} + static_cast<int32_t>(i) : tokens;
      largest = max(logits, largest);
    }
    store(item.largest + row, largest);
    store_bits(item.tokens + row, tokens);
  }
}

// scratch: kHeadItemTokens * kBlockStride floats.
template <class T>
void head_of_many(const HeadArgs& a, const void* panels, const HeadItem& item, float* scratch) {
  const LinearItem tokens = {item.first, item.end, item.first_row / kPanel, divide_up(item.end_row, kPanel)};
  multiply_block_of_tokens<T>(as_linear<T>(a, panels), tokens, scratch);
  if (a.logits == nullptr) {
    find_largest<T>(a, item, scratch);
    return;
  }
  const T* bias = static_cast<const T*>(a.bias);
  for (int64_t row = item.first_row; row < item.end_row; ++row) {
    const float* sums = scratch + row - item.first_row;
    float* to = a.logits + row * a.vocab;
    for (int64_t i = item.first; i < item.end; ++i, sums += kBlockStride)
      to[i] = bias == nullptr ? *sums : *sums + widen(bias[i]);
  }
}

template <class T>
void head(const HeadArgs& a, const void* panels, const HeadItem& item, float* scratch) {
  if (a.rows <= kDotRows) {
    head_of_few<T>(a, item, scratch);
  } else {
    head_of_many<T>(a, panels, item, scratch);
  }
}
