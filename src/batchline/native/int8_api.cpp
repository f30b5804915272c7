// The C interface of int8 linear layers: picks the instruction set's kernels, cuts the work and distributes it.
#include <algorithm>
#include <new>
#include <vector>

#include "amx.h"
#include "int8_kernels.h"
#include "parallel.h"

namespace batchline {
namespace {

constexpr int64_t kRowsAtOnce = 1024;  // quantized together: their bytes stay in the caches until they are multiplied
constexpr int64_t kRowsPerRange = 16;  // to quantize
constexpr int64_t kMinTiledRows = 3;   // fewer are faster without AMX
constexpr int64_t kPanelsPerItem = 4;  // even: gate and up go together

enum Int8Isa : int { kPortable, kAvx2, kAvxVnni, kAvx512Vnni, kAmx };
enum DType : int { kFloat32, kBFloat16 };

// How to run: one for each instruction set in use, made by `batchline_int8_open`, never changed.
struct Int8Runtime {
  const Int8Kernels* kernels;
  const Int8Kernels* few_rows;  // the kernels for them; sums of integers are the same
  RunParallel run_parallel;

  const TypedInt8Kernels& typed(int dtype, int64_t rows) const {
    const Int8Kernels* chosen = rows < kMinTiledRows ? few_rows : kernels;
    return dtype == kBFloat16 ? chosen->bfloat16 : chosen->float32;
  }
};

const Int8Kernels* kernels_of(int isa) {
  switch (isa) {
    case kPortable:
      return &kInt8PortableKernels;
#if defined(__x86_64__)
    case kAvx2:
      return &kInt8Avx2Kernels;
    case kAvxVnni:
      return &kInt8AvxVnniKernels;
    case kAvx512Vnni:
      return &kInt8Avx512VnniKernels;
    case kAmx:
      return kInt8AmxKernels;
#endif
    default:
      return nullptr;
  }
}

bool is_supported(int isa) {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == kAvx2) return has_avx2;
  if (isa == kAvxVnni) return has_avx2 && __builtin_cpu_supports("avxvnni");
  const bool has_vnni = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
  if (isa == kAvx512Vnni) return has_vnni;
  // layers in groups use AVX512-BF16 as well
  if (isa == kAmx)
    return has_vnni && __builtin_cpu_supports("avx512bf16") && kInt8AmxKernels != nullptr && may_use_amx();
#endif
  return isa == kPortable;
}

// Bytes from row to row: an odd number of cache lines, so that the rows of a tile do not fall into one set of a cache.
int64_t row_stride(const Int8LinearArgs& a) { return (divide_up(a.inputs, 64) | 1) * 64; }

void multiply(const Int8Runtime& runtime, const TypedInt8Kernels& kernels, const Int8LinearArgs& a,
              const QuantizedRows& rows, int64_t end_row) {
  const int64_t column_items = divide_up(a.num_panels(), kPanelsPerItem);
  const int64_t rows_at_once = kernels.rows_at_once(a);
  const int64_t items = divide_up(end_row - rows.first_row, rows_at_once) * column_items;
  parallel_ranges(runtime.run_parallel, items, 1, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const int64_t row = rows.first_row + i / column_items * rows_at_once, panel = i % column_items * kPanelsPerItem;
      kernels.linear(a, rows, {row, std::min(row + rows_at_once, end_row), panel,
                               std::min(panel + kPanelsPerItem, a.num_panels())});
    }
  });
}

void run_linear(const Int8Runtime& runtime, const TypedInt8Kernels& kernels, const Int8LinearArgs& a) {
  thread_local std::vector<uint8_t> bytes;  // reused by later calls, because the system would zero fresh memory
  thread_local std::vector<float> scales;
  const int64_t stride = row_stride(a), rows_at_once = std::min(a.rows, kRowsAtOnce);
  if (static_cast<int64_t>(bytes.size()) < rows_at_once * stride) bytes.resize(static_cast<size_t>(rows_at_once * stride));
  if (static_cast<int64_t>(scales.size()) < rows_at_once) scales.resize(static_cast<size_t>(rows_at_once));
  for (int64_t row = 0; row < a.rows; row += kRowsAtOnce) {
    const QuantizedRows rows{bytes.data(), scales.data(), row, stride};
    const int64_t end_row = std::min(row + kRowsAtOnce, a.rows);
    parallel_ranges(runtime.run_parallel, end_row - row, kRowsPerRange, [&](int64_t first, int64_t end) {
      kernels.quantize(a, rows, row + first, row + end);
    });
    multiply(runtime, kernels, a, rows, end_row);
  }
}

}  // namespace
}  // namespace batchline

using namespace batchline;

extern "C" {

__attribute__((visibility("default"))) int batchline_int8_is_supported(int isa) { return is_supported(isa) ? 1 : 0; }

// Null if this build or processor lacks the instruction set, or there is no memory. The result lives as long as the
// process.
__attribute__((visibility("default"))) const Int8Runtime* batchline_int8_open(int isa, RunParallel run_parallel) {
  if (!is_supported(isa) || kernels_of(isa) == nullptr) return nullptr;
  return new (std::nothrow) Int8Runtime{kernels_of(isa), kernels_of(isa == kAmx ? kAvx512Vnni : isa), run_parallel};
}

// Returns a `Status`.
__attribute__((visibility("default"))) int batchline_int8_linear(const Int8Runtime* runtime, int dtype,
                                                                 const Int8LinearArgs* a) {
  return without_throwing([&] {
    run_linear(*runtime, runtime->typed(dtype, a->rows), *a);
    return kDone;
  });
}

}  // extern "C"
