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

// Pieces of text with values between them: num_values + 1 pieces. Each value is an integer, see FormArgs.
struct PatternArgs {
  const Text* pieces;
  const int32_t* values;
  int64_t num_values;
};

// line: its values are the kinds of those that differ between the form's lines, see ValueKind. prompt, request: the
// text that prefixes are compared by, and the one that identical requests are found by; their values are indices of the
// line's values. prompt_is_text: the prompt is the characters of its only value, a string. A request without a request
// hash counts as different from all others.
struct FormArgs {
  PatternArgs line, prompt, request;
  int64_t prompt_is_text, has_request_hash;
};

// kId is the custom_id without its quotes.
enum ValueKind : int32_t { kId, kString, kArray, kObject, kInteger };

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
