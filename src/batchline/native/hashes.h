// CRC-32 and BLAKE2b, as `zlib.crc32` and `hashlib.blake2b(digest_size=16)` compute them: the plan's keys must not depend
// on whether this library was built.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace batchline {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are read as they are in memory");

inline uint64_t load64(const uint8_t* data) {
  uint64_t value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// Eight bytes at a time: table[k][b] is the effect of byte b with k more bytes behind it ("slicing by 8").
class Crc32 {
 public:
  Crc32() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320u : 0);
      table_[0][byte] = crc;
    }
    for (size_t k = 1; k < 8; ++k)
      for (size_t byte = 0; byte < 256; ++byte)
        table_[k][byte] = (table_[k - 1][byte] >> 8) ^ table_[0][table_[k - 1][byte] & 0xFF];
  }

  // The checksum of what `crc` is the checksum of, with `data` behind it.
  uint32_t extend(uint32_t crc, const uint8_t* data, int64_t size) const {
    crc = ~crc;
    for (; size >= 8; data += 8, size -= 8) {
      const uint64_t x = load64(data) ^ crc;
      crc = table_[7][x & 0xFF] ^ table_[6][x >> 8 & 0xFF] ^ table_[5][x >> 16 & 0xFF] ^ table_[4][x >> 24 & 0xFF] ^
            table_[3][x >> 32 & 0xFF] ^ table_[2][x >> 40 & 0xFF] ^ table_[1][x >> 48 & 0xFF] ^ table_[0][x >> 56];
    }
    for (; size > 0; ++data, --size) crc = (crc >> 8) ^ table_[0][(crc ^ *data) & 0xFF];
    return ~crc;
  }

 private:
  std::array<std::array<uint32_t, 256>, 8> table_;
};

// RFC 7693, without a key.
class Blake2b {
 public:
  static constexpr int64_t kDigestBytes = 16;

  typedef uint64_t Lanes4 __attribute__((vector_size(32)));
  typedef uint64_t Lanes8 __attribute__((vector_size(64)));

  struct Message {
    const uint8_t* data;
    int64_t size;
    uint8_t* out;
  };

  // Up to eight at once, as far as the processor can.
  static void digest_all(const std::vector<Message>& messages) {
    const Message *const begin = messages.data(), *const end = begin + messages.size();
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f")) return digest_avx512(begin, end);
    if (__builtin_cpu_supports("avx2")) return digest_avx2(begin, end);
#endif
    for (const Message& message : messages) digest(message);
  }

  static void digest(const Message& message) {
    uint64_t h[8];
    std::memcpy(h, kInitial, sizeof h);
    h[0] = kFirst;
    digest_rest(h, message, 0);
  }

  // Each lane of a vector digests a text of its own, and takes the next one when it has finished. One lane alone would
  // be slower than a number.
  template <typename Lanes>
  [[gnu::always_inline]] static void digest_in_lanes(const Message* messages, const Message* end) {
    constexpr int num_lanes = sizeof(Lanes) / sizeof(uint64_t);
    Reader readers[num_lanes];
    Lanes h[8] = {};
    for (;;) {
      int num_busy = 0;
      for (int lane = 0; lane < num_lanes; ++lane) {
        if (!readers[lane].is_busy && messages < end) {
          readers[lane] = {*messages++, 0, true};
          for (int i = 0; i < 8; ++i) h[i][lane] = i == 0 ? kFirst : kInitial[i];
        }
        num_busy += readers[lane].is_busy;
      }
      if (num_busy < 2) break;
      digest_blocks(h, readers);
    }
    for (int lane = 0; lane < num_lanes; ++lane) {
      uint64_t rest[8];
      for (int i = 0; i < 8; ++i) rest[i] = h[i][lane];
      if (readers[lane].is_busy) digest_rest(rest, readers[lane].message, readers[lane].num_hashed);
    }
  }

 private:
  static constexpr int64_t kBlockBytes = 128;
  static constexpr uint64_t kInitial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                           0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                           0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  static constexpr uint64_t kFirst = kInitial[0] ^ 0x01010000 ^ kDigestBytes;  // the parameters: no key
  static constexpr uint8_t kOrder[10][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
      {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
      {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
      {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
      {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

  // A text that is digested block by block.
  struct Reader {
    Message message = {};
    int64_t num_hashed = 0;
    bool is_busy = false;

    bool is_at_last_block() const { return message.size - num_hashed <= kBlockBytes; }

    // What it returns is in the message or in `space`, with zeros behind the end.
    const uint8_t* next_block(uint8_t (&space)[kBlockBytes]) {
      const uint8_t* const block = message.data + num_hashed;
      const int64_t size = std::min(kBlockBytes, message.size - num_hashed);
      num_hashed += size;
      if (size == kBlockBytes) return block;
      std::memset(space, 0, sizeof space);
      if (size > 0) std::memcpy(space, block, static_cast<size_t>(size));
      return space;
    }
  };

  // Digests the next block of each reader.
  template <typename Lanes, size_t num_lanes>
  [[gnu::always_inline]] static void digest_blocks(Lanes (&h)[8], Reader (&readers)[num_lanes]) {
    uint8_t space[kBlockBytes];
    Lanes v[16], m[16] = {}, num_hashed = {}, is_last = {};
    for (size_t lane = 0; lane < num_lanes; ++lane) {
      is_last[lane] = readers[lane].is_at_last_block() ? ~uint64_t{0} : 0;
      const uint8_t* const block = readers[lane].next_block(space);
      for (int i = 0; i < 16; ++i) m[i][lane] = load64(block + 8 * i);
      num_hashed[lane] = static_cast<uint64_t>(readers[lane].num_hashed);
    }
    for (int i = 0; i < 8; ++i) v[i] = h[i], v[i + 8] = Lanes{} + kInitial[i];
    v[12] ^= num_hashed, v[14] ^= is_last;
    mix_all(v, m);
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
    for (size_t lane = 0; lane < num_lanes; ++lane) {
      if (!readers[lane].is_busy || is_last[lane] == 0) continue;
      const uint64_t digest[] = {h[0][lane], h[1][lane]};
      std::memcpy(readers[lane].message.out, digest, kDigestBytes);
      readers[lane].is_busy = false;
    }
  }

#ifdef __x86_64__
  [[gnu::target("avx512f")]] static void digest_avx512(const Message* messages, const Message* end) {
    digest_in_lanes<Lanes8>(messages, end);
  }

  [[gnu::target("avx2")]] static void digest_avx2(const Message* messages, const Message* end) {
    digest_in_lanes<Lanes4>(messages, end);
  }
#endif

  // What follows works on a number or, in each lane, on one of several.
  template <typename T>
  [[gnu::always_inline]] static T rotated(T x, int bits) {
    return x >> bits | x << (64 - bits);
  }

  template <typename T>
  [[gnu::always_inline]] static void mix(T& a, T& b, T& c, T& d, const T& x, const T& y) {
    a += b + x;
    d = rotated(d ^ a, 32);
    c += d;
    b = rotated(b ^ c, 24);
    a += b + y;
    d = rotated(d ^ a, 16);
    c += d;
    b = rotated(b ^ c, 63);
  }

  template <int round, typename T>
  [[gnu::always_inline]] static void mix_round(T (&v)[16], const T (&m)[16]) {
    constexpr const uint8_t(&s)[16] = kOrder[round % 10];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
  }

  template <typename T>
  [[gnu::always_inline]] static void mix_all(T (&v)[16], const T (&m)[16]) {
    mix_round<0>(v, m), mix_round<1>(v, m), mix_round<2>(v, m), mix_round<3>(v, m);
    mix_round<4>(v, m), mix_round<5>(v, m), mix_round<6>(v, m), mix_round<7>(v, m);
    mix_round<8>(v, m), mix_round<9>(v, m), mix_round<10>(v, m), mix_round<11>(v, m);
  }

  // Digests what comes after the first blocks.
  static void digest_rest(uint64_t (&h)[8], const Message& message, int64_t num_hashed) {
    Reader reader{message, num_hashed, true};
    uint8_t space[kBlockBytes];
    for (bool is_last = false; !is_last;) {
      is_last = reader.is_at_last_block();
      const uint8_t* const block = reader.next_block(space);
      compress(h, block, static_cast<uint64_t>(reader.num_hashed), is_last);
    }
    std::memcpy(message.out, h, kDigestBytes);
  }

  static void compress(uint64_t (&h)[8], const uint8_t* block, uint64_t num_hashed, bool is_last) {
    uint64_t m[16], v[16];
    std::memcpy(m, block, sizeof m);
    std::memcpy(v, h, sizeof h);
    std::memcpy(v + 8, kInitial, sizeof kInitial);
    v[12] ^= num_hashed;
    if (is_last) v[14] = ~v[14];
    mix_all(v, m);
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
  }
};

}  // namespace batchline
