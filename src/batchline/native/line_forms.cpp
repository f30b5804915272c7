// Recognizes batch lines that are like an earlier one in everything but their custom_id, their prompt, and other values
// of the request that only its hashes depend on. Computes the hashes that the check pass and the plan need of them.
//
// A *form* is such an earlier line without these values: the pieces of text between them. If a line consists of the
// same pieces around a plain string and valid JSON values of the same kinds, then Python would parse it like the
// earlier line, except for the values. Every other line is left to Python. Knows nothing else about batch lines.
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>

#include "json_value.h"
#include "line_forms.h"
#include "parallel.h"

namespace batchline {
namespace {

struct Pattern {
  explicit Pattern(const PatternArgs& a) : values(a.values, a.values + a.num_values) {
    for (int64_t i = 0; i <= a.num_values; ++i) pieces.push_back(a.pieces[i].copy());
  }

  std::vector<std::string> pieces;
  std::vector<int32_t> values;
};

struct Form {
  explicit Form(const FormArgs& a)
      : line(a.line),
        prompt(a.prompt),
        request(a.request),
        prompt_is_text(a.prompt_is_text != 0),
        has_request_hash(a.has_request_hash != 0) {}

  const Pattern line, prompt, request;
  const bool prompt_is_text, has_request_hash;
};

// How lines of known forms may go on after their first values: with another piece and value, or with the last piece.
// by_last_piece: the numbers of the forms that end here.
struct Branch {
  struct Next {
    std::string piece;
    int32_t kind;
    Branch* branch;
  };

  std::vector<Next> next;
  std::unordered_map<std::string_view, int32_t> by_last_piece;
};

bool starts_with(const uint8_t* data, const uint8_t* end, const std::string& text) {
  return static_cast<size_t>(end - data) >= text.size() && std::memcmp(data, text.data(), text.size()) == 0;
}

// Whether a value of this kind may begin with the character.
bool may_begin(int32_t kind, uint8_t c) {
  switch (kind) {
    case kString: return c == '"';
    case kArray: return c == '[';
    case kObject: return c == '{';
    case kInteger: return c == '-' || (c >= '0' && c <= '9');
    default: return c != '"';  // an id that is not empty
  }
}

// As `bytes.isspace()`.
bool is_blank(const uint8_t* data, const uint8_t* end) {
  return std::all_of(data, end, [](uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); });
}

class LineForms {
 public:
  int32_t add(const FormArgs& a) {
    const auto number = static_cast<int32_t>(forms_.size());
    const Pattern& line = forms_.emplace_back(a).line;
    Branch* branch = &branches_.front();
    for (size_t i = 0; i < line.values.size(); ++i) branch = branch_after(*branch, line.pieces[i], line.values[i]);
    branch->by_last_piece.emplace(line.pieces.back(), number);
    if (values_.size() < line.values.size()) values_.resize(line.values.size());
    return number;
  }

  int64_t scan(const ScanArgs& a) {
    const uint8_t *data = a.lines.data, *const end = data + a.lines.size;
    int64_t line = 0;
    texts_.clear(), digests_.clear();
    for (; line < a.max_lines && data < end; ++line) {
      const auto* newline = static_cast<const uint8_t*>(std::memchr(data, '\n', static_cast<size_t>(end - data)));
      const uint8_t* const next = newline == nullptr ? end : newline + 1;
      a.lengths[line] = next - data;
      a.forms[line] = scan_line(a, line, data, next);
      data = next;
    }
    int64_t start = 0;
    for (Blake2b::Message& digest : digests_) {
      if (digest.data != nullptr) continue;
      digest.data = texts_.data() + start;
      start += digest.size;
    }
    Blake2b::digest_all(digests_);
    for (JsonValue& value : values_) value.free_if_large();
    return line;
  }

 private:
  Branch* branch_after(Branch& branch, const std::string& piece, int32_t kind) {
    for (const Branch::Next& next : branch.next)
      if (next.kind == kind && next.piece == piece) return next.branch;
    branch.next.push_back({piece, kind, &branches_.emplace_back()});
    return branch.next.back().branch;
  }

  int32_t scan_line(const ScanArgs& a, int64_t line, const uint8_t* data, const uint8_t* end) {
    const int32_t number = find_form(data, end);
    if (number < 0) return is_blank(data, end) ? kBlankLine : kOtherLine;
    const Form& form = forms_[static_cast<size_t>(number)];
    digests_.push_back({id_, id_end_ - id_, a.id_hashes + line * Blake2b::kDigestBytes});
    hash_prompt(a, line, form);
    hash_request(a, line, form);
    return number;
  }

  // The number of the line's form, after reading its values; kOtherLine if it has none.
  int32_t find_form(const uint8_t* data, const uint8_t* end) {
    const Branch* branch = &branches_.front();
    for (size_t value = 0;; ++value) {
      const Branch::Next* const next = next_of(*branch, data, end);
      if (next == nullptr) break;
      data = read_value(next->kind, value, data + next->piece.size(), end);
      if (data == nullptr) return kOtherLine;
      branch = next->branch;
    }
    const std::string_view rest(reinterpret_cast<const char*>(data), static_cast<size_t>(end - data));
    const auto found = branch->by_last_piece.find(rest);
    return found == branch->by_last_piece.end() ? kOtherLine : found->second;
  }

  static const Branch::Next* next_of(const Branch& branch, const uint8_t* data, const uint8_t* end) {
    for (const Branch::Next& next : branch.next) {
      if (!starts_with(data, end, next.piece)) continue;
      const uint8_t* const value = data + next.piece.size();
      if (value != end && may_begin(next.kind, *value)) return &next;
    }
    return nullptr;
  }

  // The value's end; null if it is refused.
  const uint8_t* read_value(int32_t kind, size_t value, const uint8_t* data, const uint8_t* end) {
    if (kind != kId) return values_[value].read(data, end);
    id_ = data;
    return id_end_ = end_of_string(data, end);
  }

  // The checksum of the prompt's first bytes, at each length; a shorter prompt's own checksum at the rest of them.
  void hash_prompt(const ScanArgs& a, int64_t line, const Form& form) {
    scratch_.clear();
    if (form.prompt_is_text && a.num_prefix_lengths > 0) {
      const JsonValue& value = values_[static_cast<size_t>(form.prompt.values.front())];
      value.append_characters(scratch_, a.prefix_lengths[a.num_prefix_lengths - 1]);
    } else {
      append(scratch_, form.prompt, [this](const JsonValue& value) {
        scratch_.insert(scratch_.end(), value.text(), value.text() + value.size());
      });
    }
    const auto size = static_cast<int64_t>(scratch_.size());
    uint32_t crc = 0;
    int64_t start = 0;
    for (int64_t i = 0; i < a.num_prefix_lengths; ++i) {
      const int64_t stop = std::min(a.prefix_lengths[i], size);
      crc = crc32_.extend(crc, scratch_.data() + start, stop - start);
      start = stop;
      a.prefix_hashes[line * a.num_prefix_lengths + i] = crc;
    }
    a.prompt_sizes[line] = size;
  }

  void hash_request(const ScanArgs& a, int64_t line, const Form& form) {
    uint8_t* const out = a.request_hashes + line * Blake2b::kDigestBytes;
    if (!form.has_request_hash) {
      std::memset(out, 0, Blake2b::kDigestBytes);
      return;
    }
    const size_t start = texts_.size();
    append(texts_, form.request, [this](const JsonValue& value) { value.append_sorted(texts_); });
    digests_.push_back({nullptr, static_cast<int64_t>(texts_.size() - start), out});
  }

  // Appends the pattern's pieces, and its values by `append_value`.
  template <typename AppendValue>
  void append(std::vector<uint8_t>& text, const Pattern& pattern, const AppendValue& append_value) {
    for (size_t i = 0; i < pattern.pieces.size(); ++i) {
      if (i > 0) append_value(values_[static_cast<size_t>(pattern.values[i - 1])]);
      text.insert(text.end(), pattern.pieces[i].begin(), pattern.pieces[i].end());
    }
  }

  const Crc32 crc32_;
  std::deque<Form> forms_;  // its elements stay where they are, for the keys of `by_last_piece`
  std::deque<Branch> branches_ = std::deque<Branch>(1);  // every line begins at the first one
  std::vector<JsonValue> values_;  // of the line that is being read; an id has none
  const uint8_t *id_ = nullptr, *id_end_ = nullptr;
  std::vector<uint8_t> scratch_;
  std::vector<uint8_t> texts_;              // of the requests, one behind the other
  std::vector<Blake2b::Message> digests_;  // to be computed; the text of one without data is the next of `texts_`
};

}  // namespace
}  // namespace batchline

extern "C" {

__attribute__((visibility("default"))) void* batchline_line_forms_open() {
  return new (std::nothrow) batchline::LineForms();
}

__attribute__((visibility("default"))) void batchline_line_forms_close(void* forms) {
  delete static_cast<batchline::LineForms*>(forms);
}

// The number of the new form; negative if there is no memory for it.
__attribute__((visibility("default"))) int32_t batchline_line_forms_add(void* forms, const batchline::FormArgs* args) {
  int32_t number = -1;
  batchline::without_throwing([&] {
    number = static_cast<batchline::LineForms*>(forms)->add(*args);
    return batchline::kDone;
  });
  return number;
}

// How many lines were scanned; negative if there was no memory.
__attribute__((visibility("default"))) int64_t batchline_line_forms_scan(void* forms, const batchline::ScanArgs* args) {
  int64_t count = -1;
  batchline::without_throwing([&] {
    count = static_cast<batchline::LineForms*>(forms)->scan(*args);
    return batchline::kDone;
  });
  return count;
}
}
