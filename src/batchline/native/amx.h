// Whether this process may use AMX. Its registers are large, so Linux gives them only to processes that ask.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace batchline {

// Asks once. The processor must have products of bfloat16 and of bytes; all with AMX have both, up to now.
inline bool may_use_amx() {
  static const bool is_allowed = [] {
    constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25, kAll = kBfloat16 | kTiles | kInt8;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAll) != kAll) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return is_allowed;
}

}  // namespace batchline
#else
namespace batchline {

inline bool may_use_amx() { return false; }

}  // namespace batchline
#endif
