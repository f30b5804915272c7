// Reads one JSON value and writes it as `orjson` does: without spaces, with as few escapes as possible, and a second
// time with the keys of every object sorted.
//
// Its input is untrusted. Whatever is rare or wrong is refused, and the caller parses it in Python: numbers that are not
// short integers, escapes in keys, the same key twice, deep nesting, surrogates without a partner, invalid UTF-8.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "hashes.h"

namespace batchline {

// The first byte in [data, end) that is not a plain ASCII character of a string: a quote, a backslash, a control
// character, or part of a longer character.
inline const uint8_t* end_of_plain(const uint8_t* data, const uint8_t* end) {
  constexpr uint64_t kOnes = 0x0101010101010101, kHighBits = 0x8080808080808080;
  for (; end - data >= 8; data += 8) {
    const uint64_t x = load64(data), quote = x ^ kOnes * '"', backslash = x ^ kOnes * '\\';
    const uint64_t special = (((quote - kOnes) & ~quote) | ((backslash - kOnes) & ~backslash) | (x - kOnes * 0x20) | x);
    // A borrow reaches only higher bytes, so the lowest bit that is set is right.
    if (special & kHighBits) return data + (__builtin_ctzll(special & kHighBits) >> 3);
  }
  while (data < end && *data >= 0x20 && *data < 0x80 && *data != '"' && *data != '\\') ++data;
  return data;
}

// The length of the UTF-8 sequence of several bytes at `data`; 0 if it is invalid.
inline int utf8_length(const uint8_t* data, const uint8_t* end) {
  const auto continues = [&](int i) { return end - data > i && (data[i] & 0xC0) == 0x80; };
  const uint8_t first = data[0];
  if (first >= 0xC2 && first <= 0xDF) return continues(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    if (!continues(1) || !continues(2)) return 0;
    const bool is_overlong = first == 0xE0 && data[1] < 0xA0, is_surrogate = first == 0xED && data[1] >= 0xA0;
    return is_overlong || is_surrogate ? 0 : 3;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    const bool is_overlong = first == 0xF0 && data[1] < 0x90, is_too_large = first == 0xF4 && data[1] >= 0x90;
    return is_overlong || is_too_large ? 0 : 4;
  }
  return 0;
}

// The closing quote of the string whose content starts at `data`; null if it has an escape or is invalid.
inline const uint8_t* end_of_string(const uint8_t* data, const uint8_t* end) {
  for (;;) {
    data = end_of_plain(data, end);
    if (data == end) return nullptr;
    if (*data == '"') return data;
    const int length = *data < 0x80 ? 0 : utf8_length(data, end);
    if (length == 0) return nullptr;
    data += length;
  }
}

class JsonValue {
 public:
  // Reads the value at `data`. Returns its end, or null if it is refused.
  const uint8_t* read(const uint8_t* data, const uint8_t* end) {
    const auto longest = static_cast<size_t>(end - data);  // what is written is never longer than what was read
    if (text_.size() < longest) text_.resize(longest);
    nodes_.clear(), open_children_.clear();
    in_ = data, end_ = end, out_ = text_.data();
    return read_value(0, begin_node()) ? in_ : nullptr;
  }

  // The value as `orjson.dumps` writes it.
  const uint8_t* text() const { return text_.data(); }
  int64_t size() const { return out_ - text_.data(); }

  // Frees the memory of a large value, which few lines have.
  void free_if_large() {
    free_if_large(text_);
    free_if_large(nodes_);
    free_if_large(open_children_);
  }

  // Appends the value as `orjson.dumps` writes it with `OPT_SORT_KEYS`.
  void append_sorted(std::vector<uint8_t>& sorted) const { append_sorted(nodes_[0], sorted); }

  // Appends up to max_characters of a string, without quotes and escapes.
  void append_characters(std::vector<uint8_t>& characters, int64_t max_characters) const {
    const uint8_t *data = text_.data() + 1, *const end = out_ - 1;
    for (int64_t count = 0; data < end && count < max_characters;) {
      const uint8_t* const plain = end_of_plain(data, std::min(end, data + (max_characters - count)));
      characters.insert(characters.end(), data, plain);
      count += plain - data, data = plain;
      if (data == end || count == max_characters) break;
      if (*data == '\\') {
        data = append_escaped(data, characters);
      } else {
        const int length = utf8_length(data, end);
        characters.insert(characters.end(), data, data + length);
        data += length;
      }
      ++count;
    }
  }

 private:
  static constexpr size_t kLargeBytes = 1 << 20;
  static constexpr int kMaxDepth = 32;
  static constexpr int kMaxDigits = 18;  // always within 64 bits
  static constexpr uint32_t kNone = ~0u;
  static constexpr char kControls[] = "\b\t\n\f\r", kEscapes[] = "btnfr";

  // A value, or a member of an object: where its text begins and ends, and where the key ends (in an array, where the
  // value begins). Children are linked in sorted order. Only values that contain objects have them. Neighbours in an
  // array that contain none share a node, so that a long list of numbers takes no memory.
  struct Node {
    uint32_t begin, key_end, end, first_child, next;
    bool is_object;
  };

  template <typename T>
  static void free_if_large(std::vector<T>& vector) {
    if (vector.capacity() * sizeof(T) > kLargeBytes) std::vector<T>().swap(vector);
  }

  uint32_t position() const { return static_cast<uint32_t>(out_ - text_.data()); }

  uint32_t begin_node() {
    nodes_.push_back({position(), position(), 0, kNone, kNone, false});
    return static_cast<uint32_t>(nodes_.size() - 1);
  }

  void skip_space() {
    while (in_ < end_ && (*in_ == ' ' || *in_ == '\t' || *in_ == '\r' || *in_ == '\n')) ++in_;
  }

  bool is_next(uint8_t character) const { return in_ < end_ && *in_ == character; }

  void copy_one() { *out_++ = *in_++; }

  bool read_value(int depth, uint32_t node) {
    skip_space();
    if (in_ == end_) return false;
    const bool was_read = *in_ == '"'   ? read_string()
                          : *in_ == '{' ? read_container<true>(depth, node)
                          : *in_ == '[' ? read_container<false>(depth, node)
                          : *in_ >= 'a' ? read_word("true") || read_word("false") || read_word("null")
                                        : read_integer();
    nodes_[node].end = position();
    return was_read;
  }

  template <bool is_object>
  bool read_container(int depth, uint32_t node) {
    if (depth == kMaxDepth) return false;
    const size_t first_open = open_children_.size();
    bool has_objects = is_object;
    copy_one();
    for (skip_space(); !is_next(is_object ? '}' : ']'); skip_space()) {
      if (open_children_.size() > first_open) {
        if (!is_next(',')) return false;
        copy_one();
        skip_space();
      }
      const uint32_t child = begin_node();
      if (is_object && !read_key(child)) return false;
      if (!read_value(depth + 1, child)) return false;
      has_objects = has_objects || !is_leaf(child);
      if (!is_object && open_children_.size() > first_open && is_leaf(child) && is_leaf(open_children_.back())) {
        nodes_[open_children_.back()].end = position();
        nodes_.resize(child);
      } else {
        open_children_.push_back(child);
      }
    }
    copy_one();
    nodes_[node].is_object = is_object;
    const bool is_valid = !is_object || sort_children(first_open);
    if (has_objects) link_children(node, first_open);
    open_children_.resize(first_open);
    return is_valid;
  }

  // Whether the value has no object in it.
  bool is_leaf(uint32_t node) const { return nodes_[node].first_child == kNone && !nodes_[node].is_object; }

  // A key and its colon.
  bool read_key(uint32_t child) {
    if (!is_next('"')) return false;
    const uint8_t* const close = end_of_string(in_ + 1, end_);
    if (close == nullptr) return false;
    std::memcpy(out_, in_, static_cast<size_t>(close + 1 - in_));
    out_ += close + 1 - in_, in_ = close + 1;
    skip_space();
    if (!is_next(':')) return false;
    copy_one();
    nodes_[child].key_end = position();
    return true;
  }

  // By the bytes of the keys, which is also the order of their characters. False if a key is there twice.
  bool sort_children(size_t first_open) {
    const auto begin = open_children_.begin() + static_cast<std::ptrdiff_t>(first_open), end = open_children_.end();
    std::sort(begin, end, [this](uint32_t a, uint32_t b) { return compare_keys(a, b) < 0; });
    return std::adjacent_find(begin, end, [this](uint32_t a, uint32_t b) { return compare_keys(a, b) == 0; }) == end;
  }

  int compare_keys(uint32_t a, uint32_t b) const {
    const auto start = [this](uint32_t node) { return text_.data() + nodes_[node].begin + 1; };
    const auto size = [this](uint32_t node) { return nodes_[node].key_end - nodes_[node].begin - 3; };  // `"` and `":`
    const int order = std::memcmp(start(a), start(b), std::min(size(a), size(b)));
    return order != 0 ? order : size(a) < size(b) ? -1 : size(a) > size(b);
  }

  void link_children(uint32_t node, size_t first_open) {
    uint32_t next = kNone;
    for (size_t i = open_children_.size(); i > first_open; --i) {
      nodes_[open_children_[i - 1]].next = next;
      next = open_children_[i - 1];
    }
    nodes_[node].first_child = next;
  }

  bool read_string() {
    copy_one();
    for (;;) {
      copy_plain();
      if (in_ == end_) return false;
      if (*in_ == '"') {
        copy_one();
        return true;
      }
      if (*in_ == '\\' ? !read_escape() : !copy_character()) return false;
    }
  }

  void copy_plain() {
    const uint8_t* const stop = end_of_plain(in_, end_);
    const auto length = static_cast<size_t>(stop - in_);
    std::memcpy(out_, in_, length);
    in_ = stop, out_ += length;
  }

  bool copy_character() {
    const int length = *in_ < 0x80 ? 0 : utf8_length(in_, end_);
    for (int i = 0; i < length; ++i) copy_one();
    return length > 0;
  }

  bool read_escape() {
    if (end_ - in_ < 2) return false;
    const uint8_t letter = in_[1];
    in_ += 2;
    switch (letter) {
      case 'b': return write_character('\b');
      case 'f': return write_character('\f');
      case 'n': return write_character('\n');
      case 'r': return write_character('\r');
      case 't': return write_character('\t');
      case 'u': return read_unicode_escape();
      case '"':
      case '\\':
      case '/': return write_character(letter);
      default: return false;
    }
  }

  bool read_unicode_escape() {
    uint32_t character, second;
    if (!read_four_digits(character)) return false;
    if (character >= 0xD800 && character <= 0xDFFF) {
      if (character >= 0xDC00 || end_ - in_ < 2 || in_[0] != '\\' || in_[1] != 'u') return false;
      in_ += 2;
      if (!read_four_digits(second) || second < 0xDC00 || second > 0xDFFF) return false;
      character = 0x10000 + ((character - 0xD800) << 10) + (second - 0xDC00);
    }
    return write_character(character);
  }

  bool read_four_digits(uint32_t& number) {
    if (end_ - in_ < 4) return false;
    number = 0;
    for (int i = 0; i < 4; ++i, ++in_) {
      const uint8_t lower = *in_ | 0x20;
      const int digit = *in_ >= '0' && *in_ <= '9' ? *in_ - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
      if (digit < 0) return false;
      number = number << 4 | static_cast<uint32_t>(digit);
    }
    return true;
  }

  // One character of a string, escaped if it must be.
  bool write_character(uint32_t c) {
    if (c == '"' || c == '\\') {
      *out_++ = '\\', *out_++ = static_cast<uint8_t>(c);
    } else if (c < 0x20) {
      write_control(c);
    } else if (c < 0x80) {
      *out_++ = static_cast<uint8_t>(c);
    } else {
      const int num_more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
      const uint32_t mark = num_more == 1 ? 0xC0 : num_more == 2 ? 0xE0 : 0xF0;
      *out_++ = static_cast<uint8_t>(mark | c >> 6 * num_more);
      for (int i = num_more - 1; i >= 0; --i) *out_++ = static_cast<uint8_t>(0x80 | (c >> 6 * i & 0x3F));
    }
    return true;
  }

  void write_control(uint32_t c) {
    static constexpr char kHex[] = "0123456789abcdef";
    *out_++ = '\\';
    const char* const letter = c == 0 ? nullptr : std::strchr(kControls, static_cast<int>(c));
    if (letter != nullptr) {
      *out_++ = static_cast<uint8_t>(kEscapes[letter - kControls]);
      return;
    }
    for (const char digit : {'u', '0', '0', kHex[c >> 4], kHex[c & 15]}) *out_++ = static_cast<uint8_t>(digit);
  }

  bool read_word(const char* word) {
    const size_t length = std::strlen(word);
    if (static_cast<size_t>(end_ - in_) < length || std::memcmp(in_, word, length) != 0) return false;
    std::memcpy(out_, in_, length);
    in_ += length, out_ += length;
    return true;
  }

  bool read_integer() {
    const bool is_negative = is_next('-');
    if (is_negative) copy_one();
    const uint8_t* const digits = in_;
    while (in_ < end_ && *in_ >= '0' && *in_ <= '9') copy_one();
    const auto count = in_ - digits;
    if (count == 0 || count > kMaxDigits || (*digits == '0' && (count > 1 || is_negative))) return false;
    return in_ < end_ && *in_ != '.' && *in_ != 'e' && *in_ != 'E';
  }

  void append_sorted(const Node& node, std::vector<uint8_t>& sorted) const {
    if (node.first_child == kNone) return append(node.key_end, node.end, sorted);
    sorted.push_back(node.is_object ? '{' : '[');
    for (uint32_t child = node.first_child; child != kNone; child = nodes_[child].next) {
      if (child != node.first_child) sorted.push_back(',');
      append(nodes_[child].begin, nodes_[child].key_end, sorted);
      append_sorted(nodes_[child], sorted);
    }
    sorted.push_back(node.is_object ? '}' : ']');
  }

  // The character of an escape that `write_character` has written. Returns the escape's end.
  static const uint8_t* append_escaped(const uint8_t* data, std::vector<uint8_t>& characters) {
    if (data[1] == 'u') {
      const auto low = data[5] <= '9' ? data[5] - '0' : data[5] - 'a' + 10;
      characters.push_back(static_cast<uint8_t>((data[4] - '0') << 4 | low));
      return data + 6;
    }
    const char* const letter = std::strchr(kEscapes, data[1]);
    characters.push_back(letter == nullptr ? data[1] : static_cast<uint8_t>(kControls[letter - kEscapes]));
    return data + 2;
  }

  void append(uint32_t begin, uint32_t end, std::vector<uint8_t>& sorted) const {
    sorted.insert(sorted.end(), text_.begin() + begin, text_.begin() + end);
  }

  const uint8_t *in_ = nullptr, *end_ = nullptr;
  uint8_t* out_ = nullptr;
  std::vector<uint8_t> text_;
  std::vector<Node> nodes_;  // the first one is the value itself
  std::vector<uint32_t> open_children_;
};

}  // namespace batchline
