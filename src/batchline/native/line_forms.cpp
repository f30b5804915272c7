// Recognizes batch lines that are like an earlier one in everything but their custom_id and messages, and computes the
// hashes that the check pass and the plan need of them.
//
// A *form* is such an earlier line without these two values: three pieces of text. If a line consists of the same pieces
// around a plain string and a valid JSON array, then Python would parse it like the earlier line, except for the two
// values. Every other line is left to Python. Knows nothing else about batch lines.
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>

#include "json_value.h"
#include "line_forms.h"
#include "parallel.h"

namespace batchline {
namespace {

struct Form {
  std::string after_messages, prompt_start, prompt_end, request_start, request_end;
  bool has_request_hash;
};

// Forms that begin alike. by_end: their numbers by what follows the messages.
struct Stem {
  std::string before_id, before_messages;
  std::unordered_map<std::string_view, int32_t> by_end;
};

bool starts_with(const uint8_t* data, const uint8_t* end, const std::string& text) {
  return static_cast<size_t>(end - data) >= text.size() && std::memcmp(data, text.data(), text.size()) == 0;
}

// As `bytes.isspace()`.
bool is_blank(const uint8_t* data, const uint8_t* end) {
  return std::all_of(data, end, [](uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); });
}

class LineForms {
 public:
  int32_t add(const FormArgs& a) {
    const auto number = static_cast<int32_t>(forms_.size());
    forms_.push_back({a.after_messages.copy(), a.prompt_start.copy(), a.prompt_end.copy(), a.request_start.copy(),
                      a.request_end.copy(), a.has_request_hash != 0});
    stem(a).by_end.emplace(forms_.back().after_messages, number);
    return number;
  }

  int64_t scan(const ScanArgs& a) {
    const uint8_t *data = a.lines.data, *const end = data + a.lines.size;
    int64_t line = 0;
    for (; line < a.max_lines && data < end; ++line) {
      const auto* newline = static_cast<const uint8_t*>(std::memchr(data, '\n', static_cast<size_t>(end - data)));
      const uint8_t* const next = newline == nullptr ? end : newline + 1;
      a.lengths[line] = next - data;
      a.forms[line] = scan_line(a, line, data, next);
      data = next;
    }
    return line;
  }

 private:
  Stem& stem(const FormArgs& a) {
    const std::string before_id = a.before_id.copy(), before_messages = a.before_messages.copy();
    for (Stem& stem : stems_)
      if (stem.before_id == before_id && stem.before_messages == before_messages) return stem;
    stems_.push_back({before_id, before_messages, {}});
    return stems_.back();
  }

  int32_t scan_line(const ScanArgs& a, int64_t line, const uint8_t* data, const uint8_t* end) {
    for (const Stem& stem : stems_) {
      if (!starts_with(data, end, stem.before_id)) continue;
      const uint8_t *const id = data + stem.before_id.size(), *const id_end = end_of_string(id, end);
      if (id_end == nullptr || id_end == id || !starts_with(id_end, end, stem.before_messages)) continue;
      const uint8_t* const messages = id_end + stem.before_messages.size();
      if (messages == end || *messages != '[') continue;
      const uint8_t* const messages_end = messages_.read(messages, end);
      if (messages_end == nullptr) return kOtherLine;
      const std::string_view rest(reinterpret_cast<const char*>(messages_end), static_cast<size_t>(end - messages_end));
      const auto found = stem.by_end.find(rest);
      if (found == stem.by_end.end()) continue;
      Blake2b::digest(id, id_end - id, a.id_hashes + line * Blake2b::kDigestBytes);
      hash_prompt(a, line, forms_[static_cast<size_t>(found->second)]);
      hash_request(a, line, forms_[static_cast<size_t>(found->second)]);
      return found->second;
    }
    return is_blank(data, end) ? kBlankLine : kOtherLine;
  }

  // The checksum of the prompt's first bytes, at each length; a shorter prompt's own checksum at the rest of them.
  void hash_prompt(const ScanArgs& a, int64_t line, const Form& form) {
    scratch_.clear();
    append(form.prompt_start);
    scratch_.insert(scratch_.end(), messages_.text(), messages_.text() + messages_.size());
    append(form.prompt_end);
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
    scratch_.clear();
    append(form.request_start);
    messages_.append_sorted(scratch_);
    append(form.request_end);
    Blake2b::digest(scratch_.data(), static_cast<int64_t>(scratch_.size()), out);
  }

  void append(const std::string& text) { scratch_.insert(scratch_.end(), text.begin(), text.end()); }

  const Crc32 crc32_;
  std::deque<Form> forms_;  // its elements stay where they are, for the keys of `by_end`
  std::vector<Stem> stems_;
  JsonValue messages_;
  std::vector<uint8_t> scratch_;
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
