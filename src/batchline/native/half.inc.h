// Numbers of 16 and 8 bits as floats, for instruction sets without it.

typedef int8_t I8 __attribute__((vector_size(kLanes)));
typedef uint8_t U8 __attribute__((vector_size(kLanes)));

// float16, which is finite: its exponent is rebased by a multiplication, which is exact.
inline F32 load_half(const uint16_t* from) {
  const U32 bits = __builtin_convertvector(load_bits<U16>(from), U32);
  const F32 magnitude = reinterpret<F32>((bits & 0x7fffu) << 13) * 0x1p112f;
  return reinterpret<F32>(reinterpret<U32>(magnitude) | (bits & 0x8000u) << 16);
}

inline F32 load_unsigned(const uint8_t* from) { return __builtin_convertvector(load_bits<U8>(from), F32); }
inline F32 load_signed(const uint8_t* from) { return __builtin_convertvector(load_bits<I8>(from), F32); }

// Whole numbers from -127 to 127 as bytes.
inline void store_bytes(int8_t* to, I32 x) { store_bits(to, __builtin_convertvector(x, I8)); }
