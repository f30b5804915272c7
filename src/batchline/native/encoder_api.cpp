// The C interface of encoders: one call takes sequences through all layers.
//
// Sequences are cut into groups of some hundred rows. If there are enough groups, each goes through the whole model on one
// core, which never waits and keeps its rows in its caches. A few sequences, such as those of an interactive request, go
// through together, and the cores share the work of each step.
#include <vector>

#include "encoder_kernels.h"
#include "parallel.h"

namespace batchline {
namespace {

constexpr int64_t kGroupBlocks = 2;        // a group has as many rows as so many blocks that are computed at once
constexpr int64_t kMinGroupsPerThread = 4;  // with fewer, a core could be idle for too long at the end

const EncoderKernels* encoder_kernels_of(int isa) {
#if defined(__x86_64__)
  const EncoderKernels* const all[] = {&kPortableEncoderKernels, &kAvx2EncoderKernels, &kAvx512EncoderKernels,
                                       &kAvx512Bf16EncoderKernels, kAmxEncoderKernels};
#else
  const EncoderKernels* const all[] = {&kPortableEncoderKernels};
#endif
  return all[isa];
}

bool is_index(int64_t i, int64_t count) { return i >= 0 && i < count; }

// Whether every length fits, and every token's entries are in their tables, because the caller is not trusted.
bool is_within_tables(const EncoderArgs& a) {
  for (int64_t sequence = 0; sequence < a.num_sequences; ++sequence) {
    if (!is_index(a.lengths[sequence] - 1, a.longest)) return false;
    for (int64_t i = sequence * a.longest; i < sequence * a.longest + a.lengths[sequence]; ++i) {
      const int64_t type = a.types == nullptr ? 0 : a.types[i];
      if (!is_index(a.token_ids[i], a.num_words) || !is_index(a.positions[i], a.num_positions) ||
          !is_index(type, a.num_types))
        return false;
    }
  }
  return true;
}

struct SequenceRange {
  int64_t first, end;
};

// Whole sequences, in order, of at most so many rows together, or a single longer one.
std::vector<SequenceRange> groups_of(const EncoderArgs& a, int64_t most_rows) {
  std::vector<SequenceRange> groups;
  int64_t rows = 0;
  for (int64_t sequence = 0; sequence < a.num_sequences; ++sequence) {
    const int64_t length = a.lengths[sequence];
    if (groups.empty() || rows + length > most_rows) {
      groups.push_back({sequence, sequence});
      rows = 0;
    }
    rows += length;
    groups.back().end = sequence + 1;
  }
  return groups;
}

// Memory for the rows of some sequences.
class RowMemory {
 public:
  RowMemory(const EncoderArgs& a, int64_t element_bytes, SequenceRange range)
      : first_rows_(static_cast<size_t>(range.end - range.first + 1)) {
    for (int64_t i = range.first; i < range.end; ++i) {
      const auto index = static_cast<size_t>(i - range.first);
      first_rows_[index + 1] = first_rows_[index] + a.lengths[i];
    }
    const int64_t row_bytes = a.hidden * element_bytes, num_rows = first_rows_.back();
    memory_.reset(static_cast<char*>(allocate_lines(static_cast<size_t>(5 * num_rows * row_bytes))));
    char* memory = memory_.get();
    rows_ = {memory, memory + num_rows * row_bytes, memory + 4 * num_rows * row_bytes, range.first,
             range.end - range.first, first_rows_.data()};
  }

  const EncoderRows& rows() const { return rows_; }

 private:
  std::vector<int64_t> first_rows_;
  std::unique_ptr<char, FreeDeleter> memory_;
  EncoderRows rows_;
};

// The steps of the forward pass, each over all of some rows; `spread(count, step)` calls step(index, scratch) for
// every index below count, in any order and on any core. block_rows: rows that are computed at once.
template <class Spread>
void run_layers(const EncoderArgs& a, const TypedEncoderKernels& kernels, const EncoderRows& rows, int64_t block_rows,
                Spread spread) {
  const int64_t num_rows = rows.num_rows(), row_blocks = divide_up(num_rows, block_rows);
  const auto end_of = [=](int64_t block) { return std::min((block + 1) * block_rows, num_rows); };
  spread(rows.num_sequences, [&](int64_t sequence, void*) { kernels.embed(a, rows, sequence); });
  for (int64_t layer = 0; layer < a.num_layers; ++layer) {
    spread(row_blocks, [&](int64_t block, void* scratch) {
      kernels.project(a, rows, layer, block * block_rows, end_of(block), scratch);
    });
    spread(rows.num_sequences * a.num_heads, [&](int64_t item, void* scratch) {
      kernels.attend(a, rows, item / a.num_heads, item % a.num_heads, scratch);
    });
    spread(row_blocks, [&](int64_t block, void* scratch) {
      kernels.finish(a, rows, layer, block * block_rows, end_of(block), scratch);
    });
  }
  spread(rows.num_sequences, [&](int64_t sequence, void*) { kernels.write(a, rows, sequence); });
}

// A step of `run_layers` on all cores.
template <class Step>
struct SpreadStep {
  const Step& step;
  Scratch scratch;

  void operator()(int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) step(i, scratch.get());
  }
};

void run_together(const EncoderArgs& a, const TypedEncoderKernels& kernels, RunParallel run_parallel) {
  const RowMemory memory(a, kernels.element_bytes, {0, a.num_sequences});
  const Scratch scratch(kernels.scratch_bytes(a));
  run_layers(a, kernels, memory.rows(), kMaxItemRows, [&](int64_t count, const auto& step) {
    using Step = std::decay_t<decltype(step)>;
    parallel_ranges(run_parallel, count, 1, SpreadStep<Step>{step, scratch});
  });
}

// Groups, each on one core.
struct GroupWork {
  const EncoderArgs& args;
  const TypedEncoderKernels& kernels;
  const std::vector<SequenceRange>& groups;
  Scratch scratch;

  void operator()(int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const RowMemory memory(args, kernels.element_bytes, groups[static_cast<size_t>(i)]);
      run_layers(args, kernels, memory.rows(), kernels.rows_at_once(args), [&](int64_t count, const auto& step) {
        for (int64_t index = 0; index < count; ++index) step(index, scratch.get());
      });
    }
  }
};

void encode(const EncoderArgs& a, const TypedEncoderKernels& kernels, RunParallel run_parallel, int num_threads) {
  const std::vector<SequenceRange> groups = groups_of(a, kGroupBlocks * kernels.rows_at_once(a));
  const auto num_groups = static_cast<int64_t>(groups.size());
  if (num_threads > 1 && num_groups < kMinGroupsPerThread * num_threads) {
    run_together(a, kernels, run_parallel);
  } else {
    parallel_ranges(run_parallel, num_groups, 1, GroupWork{a, kernels, groups, Scratch(kernels.scratch_bytes(a))});
  }
}

}  // namespace
}  // namespace batchline

using namespace batchline;

extern "C" {

// isa and run_parallel: as in `batchline_open`, which must have accepted them. Returns a `Status`: nothing is done if a
// length or an index into a table is out of range.
__attribute__((visibility("default"))) int batchline_encode(int isa, RunParallel run_parallel, int is_bfloat16,
                                                            const EncoderArgs* a, int num_threads) {
  if (!is_within_tables(*a)) return kOutOfRange;
  const EncoderKernels& table = *encoder_kernels_of(isa);
  return without_throwing([&] {
    encode(*a, is_bfloat16 ? table.bfloat16 : table.float32, run_parallel, num_threads);
    return kDone;
  });
}

}  // extern "C"
