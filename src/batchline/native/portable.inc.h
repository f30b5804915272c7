// Operations that any processor can do.

inline F32 fused(F32 sum, F32 a, F32 b) { return sum + a * b; }

inline I32 round_to_int(F32 x) {
  I32 rounded;
  for (int lane = 0; lane < kLanes; ++lane) rounded[lane] = static_cast<int32_t>(__builtin_lrintf(x[lane]));
  return rounded;
}
