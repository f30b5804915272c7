// The arguments of `line_forms.cpp`. `native/batch_lines.py` mirrors them.
#pragma once

#include <cstdint>
#include <string>

namespace batchline {

struct Text {
  const uint8_t* data;
  int64_t size;

  std::string copy() const { return {reinterpret_cast<const char*>(data), static_cast<size_t>(size)}; }
};

// The three pieces of a line; what surrounds the messages in the text that prefixes are compared by, and in the text that
// identical requests are found by. A request without the latter counts as different from all others.
struct FormArgs {
  Text before_id, before_messages, after_messages;
  Text prompt_start, prompt_end;
  Text request_start, request_end;
  int64_t has_request_hash;
};

// Whole lines, and arrays for at most max_lines of them. forms: the number of the line's form, kOtherLine or kBlankLine.
// The arrays after it are set only for lines that have a form.
struct ScanArgs {
  Text lines;
  int64_t max_lines;
  const int64_t* prefix_lengths;
  int64_t num_prefix_lengths;
  int64_t* lengths;  // with the line end
  int32_t* forms;
  uint8_t* id_hashes;       // (max_lines, 16)
  uint32_t* prefix_hashes;  // (max_lines, num_prefix_lengths)
  int64_t* prompt_sizes;
  uint8_t* request_hashes;  // (max_lines, 16)
};

constexpr int32_t kOtherLine = -1, kBlankLine = -2;

}  // namespace batchline
