// Spreads ranges of work over cores.
//
// Work runs on the OpenMP threads that torch uses: the caller hands over the runtime's own `GOMP_parallel`, so that
// there is one pool of (spinning) threads in the process and not two. Ranges are claimed one by one, whoever is free.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "arguments.h"

namespace batchline {

// Null where there are no threads: everything runs on the calling one.
using RunParallel = void (*)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);

// Calls work(first, end) for ranges of at most `grain` that together make up [0, count); each participating thread
// makes its own copy of `work`, whose members are thus its scratch memory.
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
  }

 private:
  static void participate(void* data) {
    auto* self = static_cast<ParallelRanges*>(data);
    Work work = self->work_;
    for (;;) {
      const int64_t first = self->next_.fetch_add(self->grain_, std::memory_order_relaxed);
      if (first >= self->count_) return;
      work(first, std::min(first + self->grain_, self->count_));
    }
  }

  const Work& work_;
  const int64_t count_, grain_;
  std::atomic<int64_t> next_{0};
};

template <class Work>
void parallel_ranges(RunParallel run_parallel, int64_t count, int64_t grain, const Work& work) {
  ParallelRanges<Work>(work, count, grain).run(run_parallel);
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// Cache-line aligned memory that a copy of its owner does not share: every thread gets its own on first use.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : bytes_(static_cast<size_t>(round_up(static_cast<int64_t>(bytes), 64))) {}
  Scratch(const Scratch& other) : bytes_(other.bytes_) {}

  void* get() {
    if (!memory_) memory_.reset(std::aligned_alloc(64, bytes_));
    return memory_.get();
  }

 private:
  size_t bytes_;
  std::unique_ptr<void, FreeDeleter> memory_;
};

}  // namespace batchline
