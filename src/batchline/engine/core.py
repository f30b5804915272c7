"""The engine: requests in, outputs out, one step at a time. Synchronous; belongs to one thread.

    schedule (which positions) -> run (one packed forward pass) -> sample (next tokens) -> retire (who has finished)

Owns the sequences. A step that runs out of memory is undone (everything preempted) and tried again smaller; only a
sequence that does not fit alone is given up.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Sequence as SequenceOf

import torch

from batchline.config import EngineConfig
from batchline.engine.block_pool import BlockPool
from batchline.engine.cache_memory import CacheMemory
from batchline.engine.logits_processing import allow_only
from batchline.engine.logprobs import token_logprobs
from batchline.engine.model_loader import load_model
from batchline.engine.model_runner import StepResult, selected_rows
from batchline.engine.placement import choose_kernels, place, size_cache
from batchline.engine.request import (
    EmbeddingOutput,
    EmbeddingRequest,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    RequestFailed,
)
from batchline.engine.sampler import sample
from batchline.engine.scheduler import Scheduler, Step
from batchline.engine.sequence import Sequence
from batchline.engine.step_outputs import embedding_output, generation_output, note_prompt_logprobs
from batchline.engine.token_masks import StepMasks, TokenMasks
from batchline.errors import ConstraintFailed, EngineOutOfMemory, NumbersNotFinite

logger = logging.getLogger(__name__)

MAX_JUDGED_BYTES = 256 << 20
"""Of a step's float32 logits that are wanted for log-probabilities of prompts: with large vocabularies those of a whole
step would take gigabytes."""

Output = GenerationOutput | EmbeddingOutput | RequestFailed


class Engine:
    """Continuous batching over one model."""

    def __init__(self, config: EngineConfig, memory: CacheMemory | None = None) -> None:
        """memory: for the KV cache, already being made ready; without it the cache gets its own."""
        self._num_threads = config.model.num_threads
        self.loaded = load_model(config.model, choose_kernels(config))
        placement = place(config, self.loaded, memory)
        self.max_model_len, num_blocks = size_cache(config, self.loaded, placement)
        pool = BlockPool(num_blocks, config.cache.block_size, enable_prefix_caching=config.cache.enable_prefix_caching)
        self._step_limits = config.scheduler
        judged = max(1, MAX_JUDGED_BYTES // (4 * self.loaded.vocab_size))
        self.scheduler = Scheduler(config.scheduler, pool, max_num_judged_tokens=judged)
        self._runner = placement.make_runner(num_blocks, self.max_model_len)
        self._masks = TokenMasks(self.loaded.vocab_size)
        self._sequences: dict[str, Sequence] = {}
        self._seeds = random.Random()
        self._prompt_tokens = self._cached_tokens = self._output_tokens = self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute something."""
        return self.scheduler.has_work

    def enter_thread(self) -> None:
        """Settings of torch that belong to the thread that steps (OpenMP keeps the number of threads per thread)."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)

    def add(self, request: GenerationRequest | EmbeddingRequest) -> None:
        """Put a request into the waiting line. Its prompt is not empty and fits `max_model_len` with max_tokens, and no
        live request has its id (callers check)."""
        given = None if isinstance(request, EmbeddingRequest) else request.sampling.seed
        sequence = Sequence(request, self._seeds.getrandbits(63) if given is None else given)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request without an output and free what it holds. Unknown ids are ignored: it may just have ended."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.abort(sequence)

    def step(self, *, holds_streams: bool = False) -> list[Output]:
        """Compute one step; returns what is new. Raises nothing for faults of single requests.

        holds_streams: of streams only first and last outputs are wanted now; the rest comes with a later one.
        """
        outputs = self._compute(self.scheduler.schedule(), holds_streams=holds_streams)
        # who lost a seat may be long in coming back to it: what was held of its tokens is told now
        waiting = [sequence for sequence in self.scheduler.take_preempted() if not sequence.is_finished]
        held = [sequence for sequence in waiting if sequence.num_emitted_tokens < sequence.num_output_tokens]
        return outputs + self._outputs(held, holds_streams=False)

    def _compute(self, step: Step, *, holds_streams: bool) -> list[Output]:
        if not step.chunks:
            return []
        masks = self._masks.start([chunk.sequence for chunk in step.chunks if chunk.is_last])
        try:
            result = self._runner.run(step)
            self._steps += 1
            return self._collect(step, result, masks, holds_streams=holds_streams)
        except (torch.OutOfMemoryError, RuntimeError) as exc:
            if not _is_out_of_memory(exc):
                raise
            return self._shrink(step, exc)
        finally:
            if masks is not None:
                masks.wait()  # the next step may need the same matchers

    def stats(self) -> EngineStats:
        """Counters since the start and the state of the queue and cache."""
        pool = self.scheduler.pool
        return EngineStats(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            steps=self._steps,
            preemptions=self.scheduler.num_preemptions,
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            cache_usage=1 - pool.num_free / pool.num_blocks,
        )

    def check_integrity(self) -> None:
        """Raises BlockPoolCorrupt where cache blocks are leaked or doubly owned."""
        self.scheduler.check_integrity()

    def free_model(self) -> None:
        """Give the memory of the model and the cache back; no step can be computed any more. Idempotent."""
        self._masks.close()
        if hasattr(self, "loaded"):
            device = self.loaded.device
            del self._runner, self.loaded
            gc.collect()  # the model's parts refer to each other
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def _collect(self, step: Step, result: StepResult, masks: StepMasks | None, *, holds_streams: bool) -> list[Output]:
        """Sample where a sequence's last position was computed, and hand out what is new."""
        first = 0
        is_finite = torch.isfinite(result.hidden).all(-1).tolist()
        sampled: list[tuple[Sequence, int]] = []
        done: list[Sequence] = []
        broken: list[Sequence] = []
        outputs: list[Output] = []
        for chunk, rows in selected_rows(step):
            own = slice(first, first + len(rows))
            first += len(rows)
            if not all(is_finite[own]):
                broken.append(chunk.sequence)
                continue
            if chunk.sequence.wants_prompt_logprobs:
                note_prompt_logprobs(chunk, result.logits[own])
            if not chunk.is_last:
                continue
            if chunk.sequence.wants_hidden:
                outputs.append(embedding_output(chunk.sequence, result.hidden[first - 1]))
                done.append(chunk.sequence)
            elif chunk.sequence.needs_next_token:
                sampled.append((chunk.sequence, first - 1))
            else:
                done.append(chunk.sequence)
        failures = self._sample(sampled, result.logits, masks)
        outputs += [RequestFailed(request_id=sequence.request_id, error=error) for sequence, error in failures]
        for sequence in done:
            sequence.finish("length")
        for sequence, _ in failures:
            self.abort(sequence.request_id)
        alive = [sequence for sequence, _ in sampled if sequence.finish_reason != "abort"]
        outputs += self._outputs([*alive, *done], holds_streams=holds_streams)
        self._retire([sequence for sequence in [*alive, *done] if sequence.is_finished])
        return outputs + [self._give_up_broken(sequence) for sequence in broken]

    def _give_up_broken(self, sequence: Sequence) -> RequestFailed:
        """End a sequence whose numbers are not finite, and take them out of the blocks that it leaves: positions of a
        block that its next owner has not written yet are read and weighed with 0, which a NaN would survive."""
        blocks = sequence.block_table
        self.abort(sequence.request_id)
        self._runner.clear(self.scheduler.pool.forget(blocks))
        error = NumbersNotFinite("the model computed numbers for this request that are not finite (NaN or infinite)")
        return RequestFailed(request_id=sequence.request_id, error=error)

    @torch.inference_mode()
    def _sample(
        self, sampled: SequenceOf[tuple[Sequence, int]], logits: torch.Tensor, masks: StepMasks | None
    ) -> list[tuple[Sequence, ConstraintFailed]]:
        """Append the next token, and its log-probabilities where wanted, to each (sequence, row of logits).

        Returns those that cannot go on, which got no token.
        """
        if not sampled:
            return []
        sequences = [sequence for sequence, _ in sampled]
        wanting = [index for index, s in enumerate(sequences) if s.sampling.logprobs is not None]
        rows = [row for _, row in sampled]
        chosen = logits if rows == list(range(len(logits))) else logits[rows]  # a copy costs as much as the sampling
        raw = chosen[wanting] if wanting else None  # a copy: sampling works in place
        if masks is not None:
            _constrain(chosen, sequences, masks)
        tokens = sample(chosen, sequences)
        if raw is not None:
            num_top = [sequences[index].sampling.logprobs or 0 for index in wanting]
            reported = token_logprobs(raw, [tokens[index] or 0 for index in wanting], num_top)
            for index, logprobs in zip(wanting, reported, strict=True):
                sequences[index].logprobs.append(logprobs)
        failures = [_append(sequence, token, masks) for sequence, token in zip(sequences, tokens, strict=True)]
        return [(sequence, error) for sequence, error in zip(sequences, failures, strict=True) if error is not None]

    def _outputs(self, sequences: SequenceOf[Sequence], *, holds_streams: bool) -> list[Output]:
        """Outputs of generating sequences that have something to tell: at each step when streamed, else at the end."""
        outputs: list[Output] = []
        for sequence in sequences:
            request = sequence.request
            if not isinstance(request, GenerationRequest):
                continue
            is_due = request.stream and (sequence.num_emitted_tokens == 0 or not holds_streams)
            if is_due or sequence.is_finished:
                outputs.append(generation_output(sequence))
        return outputs

    def _retire(self, finished: list[Sequence]) -> None:
        for sequence in finished:
            del self._sequences[sequence.request_id]
            self._prompt_tokens += sequence.num_prompt_tokens
            self._cached_tokens += sequence.num_cached_tokens or 0
            self._output_tokens += sequence.num_output_tokens
        if finished:
            self.scheduler.retire(finished)

    def _shrink(self, step: Step, exc: BaseException) -> list[Output]:
        """After a step that did not fit in memory: try smaller ones, or give up its only sequence."""
        self.scheduler.preempt_all()
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(step.chunks) > 1 or step.num_tokens > 1:
            self.scheduler.limit_steps(max(1, step.num_tokens // 2), max(1, len(step.chunks) // 2))
            logger.warning(
                "a step of %d tokens did not fit in memory; going on with steps of at most %d tokens of %d sequences",
                step.num_tokens,
                self.scheduler.max_num_batched_tokens,
                self.scheduler.max_num_seqs,
            )
            return []
        sequence = step.chunks[0].sequence
        self.abort(sequence.request_id)
        self.scheduler.limit_steps(self._step_limits.max_num_batched_tokens, self._step_limits.max_num_seqs)
        error = EngineOutOfMemory("not even one token of this request fits in memory beside the model")
        error.__cause__ = exc
        return [RequestFailed(request_id=sequence.request_id, error=error)]


def _constrain(logits: torch.Tensor, sequences: SequenceOf[Sequence], masks: StepMasks) -> None:
    """Leave to each constrained sequence what its matcher allows, once the masks are there. In place."""
    masks.wait()
    rows = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
    matchers = [sequence.matcher for sequence in sequences if sequence.matcher is not None]
    if rows:
        allow_only(logits, rows, masks.rows(matchers))


def _append(sequence: Sequence, token: int | None, masks: StepMasks | None) -> ConstraintFailed | None:
    """Give a sequence its token. Returns why it cannot go on, if it cannot."""
    failure = None if masks is None or sequence.matcher is None else masks.failure(sequence.matcher)
    if failure is not None:
        return failure
    if token is None:
        return ConstraintFailed("what the request allows, bans and demands of its output leaves no token to go on with")
    try:
        sequence.append(token)
    except ConstraintFailed as exc:
        return exc
    return None


def _is_out_of_memory(exc: BaseException) -> bool:
    # the CPU allocator has no exception type of its own
    return isinstance(exc, torch.OutOfMemoryError) or "can't allocate memory" in str(exc)
