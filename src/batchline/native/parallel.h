// Spreads ranges of work over cores.
//
// Work runs on the OpenMP threads that torch uses: the caller passes the runtime's own `GOMP_parallel`, so that there is
// only one pool of (spinning) threads in the process. Each free thread claims the next range.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

#include "arguments.h"

namespace batchline {

// Null if there are no threads: everything runs on the calling one.
using RunParallel = void (*)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);

// Calls work(first, end) for ranges of at most `grain` that together make up [0, count); each participating thread
// makes its own copy of `work`, whose members are thus its scratch memory. If a thread gets no memory, the others finish
// and the caller gets the exception, because no exception may leave a thread of the runtime.
template <class Work>
class ParallelRanges {
 public:
  ParallelRanges(const Work& work, int64_t count, int64_t grain) : work_(work), count_(count), grain_(grain) {}

  void run(RunParallel run_parallel) {
    if (run_parallel == nullptr || count_ <= grain_) {
      participate(this);
    } else {
      run_parallel(participate, this, 0, 0);  // 0 threads: as many as torch has set
    }
    if (is_out_of_memory_.load()) throw std::bad_alloc();
  }

 private:
  static void participate(void* data) noexcept {
    auto* self = static_cast<ParallelRanges*>(data);
    try {
      self->claim_ranges();
    } catch (const std::bad_alloc&) {
      self->is_out_of_memory_.store(true);
    }
  }

  void claim_ranges() {
    Work work = work_;
    for (;;) {
      const int64_t first = next_.fetch_add(grain_, std::memory_order_relaxed);
      if (first >= count_) return;
      work(first, std::min(first + grain_, count_));
    }
  }

  const Work& work_;
  const int64_t count_, grain_;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> is_out_of_memory_{false};
};

template <class Work>
void parallel_ranges(RunParallel run_parallel, int64_t count, int64_t grain, const Work& work) {
  ParallelRanges<Work>(work, count, grain).run(run_parallel);
}

// The result of a call of the C interface.
enum Status : int { kDone, kOutOfRange, kOutOfMemory };

// Runs a call that returns a status, and turns exceptions of missing memory (and length_error, for impossible sizes) into
// a status, because nothing may be thrown across the C interface.
template <class Call>
int without_throwing(Call call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  } catch (const std::length_error&) {
    return kOutOfMemory;
  }
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory in whole cache lines.
inline void* allocate_lines(size_t bytes) {
  void* memory = std::aligned_alloc(64, static_cast<size_t>(round_up(static_cast<int64_t>(bytes), 64)));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Cache-line aligned memory that a copy of its owner does not share: every thread gets its own on first use.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : bytes_(bytes) {}
  Scratch(const Scratch& other) : bytes_(other.bytes_) {}

  void* get() {
    if (!memory_) memory_.reset(allocate_lines(bytes_));
    return memory_.get();
  }

 private:
  size_t bytes_;
  std::unique_ptr<void, FreeDeleter> memory_;
};

}  // namespace batchline
