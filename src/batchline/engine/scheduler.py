"""What the next step computes: which sequences, which of their positions, in which cache blocks.

No tensors, no torch. One step holds at most `max_num_batched_tokens` new positions of at most `max_num_seqs`
sequences; decodes and prefill chunks share it. Running sequences go first, in the order (priority, arrival); waiting
ones fill what is left. When the cache is full, the last sequence in that order is preempted: its blocks are freed and
it is computed again later from its tokens (recompute), which the prefix cache may shorten. So it is when a waiting
sequence of a strictly smaller priority finds no seat or no blocks; equal ones never take each other's, so that no two
can take turns at it.

A block is registered for reuse as soon as the step that fills it is scheduled. This is safe because every layer
writes the step's keys and values before any of its sequences read them, so even sequences of the same step share.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from batchline.config import SchedulerConfig
from batchline.engine.block_pool import BlockPool
from batchline.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, end) of one sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """New positions."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the sequence's next token (or its hidden state) comes out of this step."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One packed forward pass."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """New positions of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Owns the waiting line, the running sequences and, through the pool, their blocks."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, max_num_judged_tokens: int | None = None) -> None:
        """max_num_judged_tokens: prompt positions of a step whose logits are wanted, all sequences together; None does
        not limit them."""
        self._max_num_judged_tokens = max_num_judged_tokens or config.max_num_batched_tokens
        self._num_judged_tokens = 0
        self.limit_steps(config.max_num_batched_tokens, config.max_num_seqs)
        self.pool = pool
        self.running: list[Sequence] = []
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self.num_preemptions = 0
        self._preempted: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences in the waiting line (aborted ones leave it when their turn comes)."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        return bool(self.running or self._waiting)

    def limit_steps(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        """How much a step may hold from now on. Sequences that run already keep their seats."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the waiting line. It must fit into the whole cache on its own."""
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def abort(self, sequence: Sequence) -> None:
        """End a sequence wherever it is and free its blocks."""
        if sequence.is_finished:
            return
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.finish("abort")
        if was_running:
            self.retire([sequence])

    def retire(self, finished: list[Sequence]) -> None:
        """Free the blocks of finished running sequences."""
        for sequence in finished:
            self.pool.free(sequence.block_table)
            sequence.block_table = []
        self.running = [sequence for sequence in self.running if not sequence.is_finished]

    def schedule(self) -> Step:
        """The next step. Allocates blocks and marks the positions as computed; may preempt."""
        budget = self.max_num_batched_tokens
        self._num_judged_tokens = 0
        chunks: list[Chunk] = []
        for sequence in sorted(self.running, key=lambda s: s.order):
            urgent = self._admit(budget, before=sequence)
            chunks += urgent
            budget -= sum(chunk.num_tokens for chunk in urgent)
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted just now, for one before it
            end = self._reach(sequence, budget)
            if end == sequence.num_computed_tokens or not self._make_room(sequence, end):
                continue
            chunks.append(self._take(sequence, end))
            budget -= chunks[-1].num_tokens
        chunks.extend(self._admit(budget))
        return Step(tuple(chunks))

    def preempt_all(self) -> None:
        """Take every block back and forget all prefixes: after a step that failed half-way."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self.pool.reset_prefixes()

    def take_preempted(self) -> list[Sequence]:
        """The sequences that were preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return list(dict.fromkeys(preempted))

    def check_integrity(self) -> None:
        """Raises BlockPoolCorrupt where blocks are leaked, doubly owned or wrongly free."""
        self.pool.check_integrity([sequence.block_table for sequence in self.running])

    def _admit(self, budget: int, *, before: Sequence | None = None) -> list[Chunk]:
        """Move waiting sequences into the step while budget, seats and blocks last.

        before: a running sequence that is to have its turn now; only those of a smaller priority are admitted, and
        what they lack is taken from the back of the order, where none has had its turn yet.
        """
        chunks: list[Chunk] = []
        while budget > 0 and self._waiting:
            sequence = self._waiting[0][1]
            if sequence.is_finished:  # aborted while it waited
                heapq.heappop(self._waiting)
                continue
            if before is not None and sequence.priority >= before.priority:
                break
            if self._reach(sequence, budget) == 0:
                break  # it is judged, and the step has enough of that
            if len(self.running) >= self.max_num_seqs or not self._seat(sequence):
                if before is not None and self._preempt_behind(sequence):
                    continue
                break
            heapq.heappop(self._waiting)
            end = self._reach(sequence, budget)
            chunks.append(self._take(sequence, end))
            budget -= chunks[-1].num_tokens
        return chunks

    def _preempt_behind(self, sequence: Sequence) -> bool:
        """Preempt the last running sequence if its priority is greater; False if it is not."""
        victim = max(self.running, key=lambda s: s.order, default=None)
        if victim is None or victim.priority <= sequence.priority:
            return False
        self._preempt(victim)
        return True

    def _seat(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the cached prefix and blocks for all its tokens; False if they are not free."""
        pool = self.pool
        max_cached = 0 if sequence.wants_prompt_logprobs else (sequence.num_tokens - 1) // pool.block_size
        cached = pool.find_prefix(sequence.token_ids, max_cached)
        missing = self._num_blocks(sequence.num_tokens) - len(cached)
        if not pool.can_allocate(missing + pool.num_free_among(cached)):
            return False
        pool.reference(cached)
        sequence.block_table = cached + pool.allocate(missing)
        sequence.num_computed_tokens = len(cached) * pool.block_size
        sequence.num_registered_blocks = len(cached)
        sequence.last_block_uid = pool.uid_of(cached[-1]) if cached else 0
        if sequence.num_cached_tokens is None:  # a preempted sequence keeps what its first start found
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return True

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Blocks for positions up to `end`, preempting from the back of the order; False if it was itself preempted."""
        missing = self._num_blocks(end) - len(sequence.block_table)
        while missing > 0 and not self.pool.can_allocate(missing):
            victim = max(self.running, key=lambda s: s.order)
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.block_table += self.pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._preempted.append(sequence)
        self.pool.free(sequence.block_table)
        sequence.forget_computed()
        self.running.remove(sequence)
        self.add(sequence)

    def _reach(self, sequence: Sequence, budget: int) -> int:
        """Where the sequence's chunk of this step may end."""
        if self._is_judged(sequence):
            budget = min(budget, self._max_num_judged_tokens - self._num_judged_tokens)
        return sequence.num_computed_tokens + min(sequence.num_uncomputed_tokens, budget)

    def _is_judged(self, sequence: Sequence) -> bool:
        return sequence.wants_prompt_logprobs and sequence.num_computed_tokens < sequence.num_prompt_tokens

    def _take(self, sequence: Sequence, end: int) -> Chunk:
        """The chunk up to `end`; its positions count as computed and its full blocks as registered from here on."""
        chunk = Chunk(sequence, sequence.num_computed_tokens, end)
        if self._is_judged(sequence):
            self._num_judged_tokens += chunk.num_tokens
        sequence.num_computed_tokens = end
        size = self.pool.block_size
        while (sequence.num_registered_blocks + 1) * size <= end:
            index = sequence.num_registered_blocks
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            sequence.last_block_uid = self.pool.register(sequence.block_table[index], sequence.last_block_uid, tokens)
            sequence.num_registered_blocks += 1
        return chunk

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)
