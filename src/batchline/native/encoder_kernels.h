// Encoders of the BERT family: the kernels' arguments, and the table of kernels that each instruction set provides.
//
// Inputs and outputs are padded to one length, but the computation is packed: a *row* is one token, the sequences' rows
// follow each other without padding. Everything in a layer except attention works row by row.
#pragma once

#include <type_traits>

#include "grouped_kernels.h"

namespace batchline {

// Weights as in `LinearArgs`; or, with scales, bytes in groups (`kQ8_0`) as in `GroupedLinearArgs`, only in bfloat16. The
// bias is never null.
struct PackedWeight {
  const void* panels;
  const void* bias;
  const uint16_t* scales;  // null: the panels are not in groups
  const void* factors;     // only with scales: what each input is multiplied by before it becomes a byte
};

struct NormWeights {
  const void* weight;
  const void* bias;
};

// x = norm(x + attention_out(attention(qkv(x)))), then x = norm(x + down(gelu(up(x)))).
struct EncoderLayer {
  PackedWeight qkv, attention_out, up, down;
  NormWeights attention_norm, output_norm;
};

struct EncoderArgs {
  const int64_t* token_ids;  // (num_sequences, longest)
  const int64_t* positions;  // likewise
  const int64_t* types;      // likewise; null: all zero
  const int64_t* lengths;    // (num_sequences): at least 1, at most longest
  const void* words;         // (words, hidden), and so on
  const void* position_table;
  const void* type_table;
  NormWeights embedding_norm;
  const EncoderLayer* layers;
  const GroupedKernels* grouped;  // for weights in groups; null: there are none
  void* out;  // (num_sequences, longest, hidden); padding becomes zero
  int64_t num_words, num_positions, num_types;  // entries of the tables
  int64_t num_sequences, longest, num_layers, num_heads, hidden, intermediate;
  float eps, scale;

  int64_t head_dim() const { return hidden / num_heads; }
};

// Some whole sequences on their way through the layers, as packed rows. first_rows: each sequence's, and the end.
struct EncoderRows {
  void* x;         // (rows, hidden)
  void* qkv;       // (rows, 3 * hidden)
  void* attended;  // (rows, hidden)
  int64_t first_sequence, num_sequences;
  const int64_t* first_rows;

  int64_t num_rows() const { return first_rows[num_sequences]; }
};

// All kernels are serial. No other thread uses scratch, of `scratch_bytes`, while they run. `project` and `finish`
// take at most `rows_at_once` rows, `attend` one head of one sequence, whose index counts from `first_sequence`.
struct TypedEncoderKernels {
  int64_t element_bytes;
  int64_t (*rows_at_once)(const EncoderArgs&);  // enough for full speed, few enough to stay in a core's caches
  size_t (*scratch_bytes)(const EncoderArgs&);
  void (*embed)(const EncoderArgs&, const EncoderRows&, int64_t sequence);
  void (*project)(const EncoderArgs&, const EncoderRows&, int64_t layer, int64_t first_row, int64_t end_row,
                  void* scratch);
  void (*attend)(const EncoderArgs&, const EncoderRows&, int64_t sequence, int64_t head, void* scratch);
  void (*finish)(const EncoderArgs&, const EncoderRows&, int64_t layer, int64_t first_row, int64_t end_row,
                 void* scratch);
  void (*write)(const EncoderArgs&, const EncoderRows&, int64_t sequence);
};

struct EncoderKernels {
  TypedEncoderKernels float32;
  TypedEncoderKernels bfloat16;
};

extern const EncoderKernels kPortableEncoderKernels;
#if defined(__x86_64__)
extern const EncoderKernels kAvx2EncoderKernels;
extern const EncoderKernels kAvx512EncoderKernels;
extern const EncoderKernels kAvx512Bf16EncoderKernels;
extern const EncoderKernels* const kAmxEncoderKernels;  // null: this build has none
#endif

}  // namespace batchline
