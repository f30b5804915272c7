// Sorts rows of bytes in place, by their bytes from the first to the last (American flag sort: rows are dealt out by one
// byte into 256 buckets, and each bucket is sorted by the bytes after it).
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

namespace batchline {
namespace {

constexpr int64_t kFewRows = 24;  // so many are sorted faster by comparing them

struct Rows {
  uint8_t* data;
  int64_t width;

  uint8_t* operator[](int64_t i) const { return data + i * width; }
  void swap(int64_t i, int64_t k) const { std::swap_ranges((*this)[i], (*this)[i] + width, (*this)[k]); }
};

// Rows [first, end), which are equal before byte `at`.
void sort_few(const Rows& rows, int64_t first, int64_t end, int64_t at) {
  const auto rest = static_cast<size_t>(rows.width - at);
  for (int64_t i = first + 1; i < end; ++i)
    for (int64_t k = i; k > first && std::memcmp(rows[k - 1] + at, rows[k] + at, rest) > 0; --k) rows.swap(k - 1, k);
}

void sort(const Rows& rows, int64_t first, int64_t end, int64_t at) {
  int64_t ends[256] = {}, next[256];
  for (; at < rows.width; ++at) {
    if (end - first <= kFewRows) return sort_few(rows, first, end, at);
    std::fill(std::begin(ends), std::end(ends), 0);
    for (int64_t i = first; i < end; ++i) ++ends[rows[i][at]];
    if (ends[rows[first][at]] < end - first) break;  // else they are equal in this byte, too
  }
  if (at == rows.width) return;
  int64_t total = first;
  for (int bucket = 0; bucket < 256; ++bucket) {
    next[bucket] = total;
    total = ends[bucket] += total;
  }
  for (int bucket = 0; bucket < 256; ++bucket) {
    while (next[bucket] < ends[bucket]) {
      const int target = rows[next[bucket]][at];
      if (target == bucket) {
        ++next[bucket];
      } else {
        rows.swap(next[bucket], next[target]++);
      }
    }
  }
  for (int bucket = 0; bucket < 256; ++bucket) {
    const int64_t start = bucket == 0 ? first : ends[bucket - 1];
    if (ends[bucket] - start > 1) sort(rows, start, ends[bucket], at + 1);
  }
}

}  // namespace
}  // namespace batchline

extern "C" __attribute__((visibility("default"))) void batchline_sort_rows(uint8_t* data, int64_t count, int64_t width) {
  batchline::sort({data, width}, 0, count, 0);
}
