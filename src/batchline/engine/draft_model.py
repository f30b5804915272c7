"""Guesses by a draft model: a smaller model with the same vocabulary, whose next tokens are the guesses.

The draft model has a cache of its own with a few *seats*. A sequence in a seat has a shadow: a sequence that holds its
tokens, the latest guesses and the seat's blocks. Before a step, the draft model computes what is new of the shadow,
and then one guess after another, for all sequences together. If much is new, such as a prompt, it *catches up* first:
before each step by at most as many tokens as a step may hold. Until then, that sequence has no guesses.

Each guess is sampled with the sequence's own parameters and random number, so that two models with similar
probabilities often draw the same token.

Only time can be lost. `DraftTime` keeps account of it: computing a long prompt with the draft model must be affordable.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional

from batchline.config import EngineConfig, SpeculationConfig
from batchline.engine.model_loader import LoadedModel, load_model
from batchline.engine.model_runner import StepResult, StepRunner
from batchline.engine.placement import choose_kernels, place
from batchline.engine.request import GenerationRequest, SamplingParams
from batchline.engine.sampler import SamplingState, sample
from batchline.engine.sequence import Continued
from batchline.engine.sequence import Sequence as RunningSequence
from batchline.engine.speculation import MAX_ROWS, SIZES, Guesser, PromptLookup, StepCosts, decodes
from batchline.engine.step import Chunk, Step, pack
from batchline.engine.step_results import SequenceResult
from batchline.errors import ModelLoadError

logger = logging.getLogger(__name__)

MAX_SEATS = 8
MAX_CACHE_BYTES = 2 << 30
"""Of the draft model's cache; there are fewer seats if contexts are long."""

ALLOWED_SHARE = 0.03
FIRST_ALLOWANCE_S = 0.5
MIN_ALLOWANCE_S = -0.5
MAX_ALLOWANCE_S = 5.0
"""The draft model may lose a share of the time of steps, besides what it has gained, and half a second at the start.
What it loses beyond the minimum is forgiven, so that it gets another chance soon."""


class DraftTime:
    """How much time drafting may lose, in seconds. Mutable.

    per_token: of computing a prompt with the draft model; None before the first.
    """

    def __init__(self) -> None:
        self._allowance = FIRST_ALLOWANCE_S
        self._per_token: float | None = None

    def affords(self, num_tokens: int) -> bool:
        """Whether so many tokens of prompts may be computed."""
        return self._per_token is None or self._per_token * num_tokens <= self._allowance

    def note_prompt(self, num_tokens: int, seconds: float) -> None:
        """So many tokens of prompts took so long."""
        self._per_token = seconds / num_tokens
        self._add(-seconds)

    def note_step(self, seconds: float, gained: float) -> None:
        """A step took so long. gained: the time that it saved, below 0 if guesses made it longer. Neither holds the
        time for prompts (`note_prompt`)."""
        self._add(ALLOWED_SHARE * seconds + gained)

    def _add(self, seconds: float) -> None:
        self._allowance = min(MAX_ALLOWANCE_S, max(MIN_ALLOWANCE_S, self._allowance + seconds))


@dataclass(slots=True)
class _Seat:
    """A sequence's place in the draft model's cache. num_known: the tokens of the shadow that are the sequence's."""

    shadow: RunningSequence
    num_known: int = 0

    def follow(self, sequence: RunningSequence) -> None:
        """Take over the sequence's new tokens. Positions with right guesses stay computed."""
        shadow, start = self.shadow, self.num_known
        drafted, tokens = shadow.token_ids[start:], sequence.token_ids[start:]
        num_right = next((n for n, (a, b) in enumerate(zip(drafted, tokens, strict=False)) if a != b), len(drafted))
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, start + num_right, sequence.num_tokens - 1)
        del shadow.token_ids[start:]
        shadow.token_ids.extend(tokens)
        self.num_known = sequence.num_tokens


class DraftModel:
    """Computes guesses. Raises whatever its model raises."""

    def __init__(
        self, loaded: LoadedModel, runner: StepRunner, num_seats: int, blocks_per_seat: int, size: int
    ) -> None:
        """size: positions of a block."""
        self.num_token_ids = loaded.num_token_ids
        self.max_num_tokens = min(loaded.max_model_len, blocks_per_seat * size)
        self.num_seats = num_seats
        self._runner = runner
        self._block_size = size
        self._free = [list(range(n * blocks_per_seat, (n + 1) * blocks_per_seat)) for n in range(num_seats)]
        self._seats: dict[RunningSequence, _Seat] = {}

    def knows(self, sequence: RunningSequence) -> bool:
        """Whether it has embeddings for all tokens of a sequence."""
        return int(np.frombuffer(sequence.token_ids, dtype=np.int64).max()) < self.num_token_ids

    def keep_only(self, running: Iterable[RunningSequence]) -> None:
        """Free the seats of all other sequences."""
        for sequence in self._seats.keys() - set(running):
            self._free.append(self._seats.pop(sequence).shadow.block_table)

    def follow(self, sequences: Iterable[RunningSequence]) -> None:
        """Take over the new tokens of sequences, and give a seat to those without. There must be enough."""
        for sequence in sequences:
            if sequence not in self._seats:
                self._seats[sequence] = _Seat(_shadow(sequence, self._free.pop()))
            self._seats[sequence].follow(sequence)

    def num_missing(self, sequence: RunningSequence) -> int:
        """Tokens of a sequence with a seat that it must compute before it can guess; at least 1."""
        return self._seats[sequence].shadow.num_uncomputed_tokens

    def catch_up(self, sequences: Iterable[RunningSequence], most: int) -> int:
        """Compute what is missing of sequences, in their order, without the last tokens, which give the first guesses.
        Returns how many tokens it has computed: at most `most`."""
        chunks: list[Chunk] = []
        room = most
        for shadow in (self._seats[sequence].shadow for sequence in sequences):
            start = shadow.num_computed_tokens
            end = min(shadow.num_tokens - 1, start + room)
            if end > start:
                chunks.append(Chunk(shadow, start, end))
                room -= end - start
        self._compute(chunks)
        return most - room

    def start(self, sequences: Sequence[RunningSequence], vocab_size: int) -> list[int | None]:
        """The first guess for each sequence; None if there is no token. Computes all that is missing."""
        return self._next(sequences, sequences, vocab_size)

    def go_on(
        self, sequences: Sequence[RunningSequence], guesses: Sequence[tuple[int, ...]], vocab_size: int
    ) -> list[int | None]:
        """The next guess for each sequence after its latest ones."""
        for sequence, own in zip(sequences, guesses, strict=True):
            self._seats[sequence].shadow.token_ids.append(own[-1])
        states = [Continued(sequence, own) for sequence, own in zip(sequences, guesses, strict=True)]
        return self._next(sequences, states, vocab_size)

    def _next(
        self, sequences: Sequence[RunningSequence], states: Sequence[SamplingState], vocab_size: int
    ) -> list[int | None]:
        shadows = [self._seats[sequence].shadow for sequence in sequences]
        result = self._compute([Chunk(shadow, shadow.num_computed_tokens, shadow.num_tokens) for shadow in shadows])
        assert result.logits is not None, "shadows are not greedy"
        with torch.inference_mode():
            return sample(_resized(result.logits[:, : self.num_token_ids], vocab_size), states)

    def _compute(self, chunks: Sequence[Chunk]) -> StepResult:
        with torch.inference_mode():
            result = self._runner.run(pack(Step(tuple(chunks)), self._block_size))
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.end
        return result


def _resized(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits for exactly so many tokens, because the settings of sequences may name any of them. Those that the draft
    model does not have are never drawn."""
    missing = vocab_size - logits.shape[1]
    return functional.pad(logits, (0, missing), value=-math.inf) if missing > 0 else logits[:, :vocab_size]


def _shadow(sequence: RunningSequence, blocks: list[int]) -> RunningSequence:
    sampling = SamplingParams(max_tokens=1, temperature=1.0)  # not greedy: its steps must have logits
    request = GenerationRequest(request_id=sequence.request_id, prompt_token_ids=(), sampling=sampling)
    shadow = RunningSequence(request, 0)
    shadow.block_table = blocks
    return shadow


class Drafter(Guesser):
    """Guesses by a draft model. num_token_ids: of that model."""

    def __init__(self, config: SpeculationConfig, model: DraftModel, vocab_size: int, max_num_tokens: int) -> None:
        """vocab_size: of the model whose tokens are guessed. max_num_tokens: the limit of the draft model's steps."""
        super().__init__(config)
        self._model: DraftModel | None = model
        self.num_token_ids = model.num_token_ids
        self._vocab_size = vocab_size
        self._max_num_tokens = max_num_tokens
        self._draft_costs = StepCosts()
        self._time = DraftTime()
        self._drafting_s = self._prompt_s = 0.0

    def guess(self, running: Sequence[RunningSequence], *, may_grow: bool) -> None:
        """See `Guesser.guess`."""
        self._drafting_s = self._prompt_s = 0.0
        for sequence in running:
            sequence.guesses = ()
        model = self._model
        if model is None:
            return
        model.keep_only(running)
        if may_grow or not 0 < len(running) <= model.num_seats or not all(map(decodes, running)):
            return
        drafted = [
            s
            for s in running
            if s.may_guess and 0 < self._most(s) <= model.max_num_tokens - s.num_tokens and model.knows(s)
        ]
        count = self._num_worth_it(drafted, len(running)) if drafted else 0
        if count == 0:
            return
        began_at = time.monotonic()
        try:
            if ready := self._ready(model, drafted):
                self._draft(model, ready, count)
        except Exception:
            logger.exception("the draft model failed; there are no more guesses")
            self._model = None
        self._drafting_s = time.monotonic() - began_at

    def free(self) -> None:
        """See `Guesser.free`."""
        super().free()
        self._model = None

    def note_step(self, step: Step, results: Iterable[SequenceResult], seconds: float) -> None:
        """See `Guesser.note_step`."""
        results = list(results)
        checking_s = seconds - self._drafting_s
        super().note_step(step, results, checking_s)
        step_s = seconds - self._prompt_s
        self._time.note_step(step_s, self._gained(step, results, step_s))

    def _gained(self, step: Step, results: Sequence[SequenceResult], seconds: float) -> float:
        """The time that guesses saved in a step of so many seconds. 0 if it computed prompts, too: how long it would
        have taken without guesses is not known."""
        num_running, num_tokens = len(step.chunks), sum(len(result.tokens) for result in results)
        has_guesses = any(chunk.guesses for chunk in step.chunks)
        has_prompts = any(chunk.end - chunk.start > 1 for chunk in step.chunks)
        if not has_guesses or has_prompts or not self._costs.knows(num_running):
            return 0.0
        return self._costs.of(num_running) * num_tokens / num_running - seconds

    def _ready(self, model: DraftModel, drafted: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Those of which little is missing, perhaps after some of the others have caught up."""
        most = MAX_ROWS // len(drafted)
        model.follow(drafted)
        late = [sequence for sequence in drafted if model.num_missing(sequence) > most]
        affordable = self._affordable(model, late)
        if affordable:
            began_at = time.monotonic()
            num_computed = model.catch_up(affordable, self._max_num_tokens)
            self._prompt_s = time.monotonic() - began_at
            self._time.note_prompt(num_computed, self._prompt_s)
        return [sequence for sequence in drafted if model.num_missing(sequence) <= most]

    def _affordable(self, model: DraftModel, late: Iterable[RunningSequence]) -> list[RunningSequence]:
        """Those for which there is time to compute all that is missing, the least first."""
        affordable: list[RunningSequence] = []
        num_missing = 0
        for sequence in sorted(late, key=model.num_missing):
            num_missing += model.num_missing(sequence)
            if self._config.mode != "always" and not self._time.affords(num_missing):
                break
            affordable.append(sequence)
        return affordable

    def _num_worth_it(self, drafted: Sequence[RunningSequence], num_running: int) -> int:
        """How many guesses of each sequence pay together."""
        most = min(max(map(self._most, drafted)), (MAX_ROWS - num_running) // len(drafted))
        if self._config.mode == "always" or most <= 0:
            return max(0, most)
        if not self._costs.knows(num_running):
            return 0
        chances = [self._chance(sequence, self._kind(sequence)) for sequence in drafted]
        rates = {count: self._rate(chances, num_running, count) for count in _counts(most)}
        best = max(rates, key=rates.__getitem__)
        return self._choose(best, rates[best] * self._costs.of(num_running) / num_running, 1)

    def _rate(self, chances: Sequence[float], num_running: int, count: int) -> float:
        """Tokens per second with so many guesses for each drafted sequence."""
        gains = sum(chance**place for chance in chances for place in range(1, count + 1))
        drafting = 0.0  # until it is known
        if self._draft_costs.knows(len(chances)):
            drafting = count * self._draft_costs.of(len(chances))
        return (num_running + gains) / (self._cost(num_running + count * len(chances), num_running) + drafting)

    def _draft(self, model: DraftModel, drafted: list[RunningSequence], count: int) -> None:
        began_at = time.monotonic()
        active, tokens = drafted, model.start(drafted, self._vocab_size)
        self._draft_costs.note(len(active), time.monotonic() - began_at)
        for _ in range(count - 1):
            active = _extend(active, tokens, self._most)
            if not active:
                return
            began_at = time.monotonic()
            tokens = model.go_on(active, [sequence.guesses for sequence in active], self._vocab_size)
            self._draft_costs.note(len(active), time.monotonic() - began_at)
        _extend(active, tokens, self._most)


def _counts(most: int) -> list[int]:
    """Numbers of guesses to choose from."""
    return sorted({min(size - 1, most) for size in SIZES})


def _extend(
    sequences: Iterable[RunningSequence], tokens: Iterable[int | None], most: Callable[[RunningSequence], int]
) -> list[RunningSequence]:
    """Add each sequence's next guess. Returns those that may have further ones."""
    extended = []
    for sequence, token in zip(sequences, tokens, strict=True):
        if token is not None:
            sequence.guesses = (*sequence.guesses, token)
            extended.append(sequence)
    return [sequence for sequence in extended if len(sequence.guesses) < most(sequence)]


def make_guesser(config: EngineConfig, loaded: LoadedModel) -> Guesser | None:
    """What guesses for an engine; None if nothing does. On other devices than CPUs, nobody has measured whether guesses
    pay. Raises: ModelLoadError."""
    speculation = config.speculation
    if loaded.device.type != "cpu":
        if speculation.draft_model is not None:
            raise ModelLoadError(speculation.draft_model, f"a draft model runs on CPUs, and not on {loaded.device}")
        if speculation not in (SpeculationConfig(), SpeculationConfig(mode="off")):
            logger.warning(
                "%s: the options of speculative decoding have no effect on %s: only on CPUs are tokens guessed",
                config.model.names[0],
                loaded.device,
            )
        return None
    if speculation.mode == "off":
        return None
    if speculation.draft_model is None:
        return PromptLookup(speculation)
    model = _load(config, speculation.draft_model, loaded)
    return Drafter(speculation, model, loaded.num_token_ids, config.scheduler.max_num_batched_tokens)


def draft_config(config: EngineConfig, folder: str) -> EngineConfig:
    """What a draft model in a folder is loaded with, beside the model of `config`."""
    model = replace(
        config.model, model=folder, tokenizer=None, revision=None, max_model_len=None, hf_overrides={}, task="auto"
    )
    return replace(config, model=model)


def cache_size(num_positions: int, size: int, block_bytes: int) -> tuple[int, int]:
    """(seats, blocks of a seat) of a draft model's cache for contexts of so many positions. size: positions of a
    block."""
    blocks_per_seat = -(-num_positions // size)
    return max(1, min(MAX_SEATS, MAX_CACHE_BYTES // (blocks_per_seat * block_bytes))), blocks_per_seat


def _load(config: EngineConfig, folder: str, target: LoadedModel) -> DraftModel:
    """Raises: ModelLoadError."""
    own = draft_config(config, folder)
    loaded = load_model(own.model, choose_kernels(own))
    placement = place(own, loaded)
    size = config.cache.block_size
    num_positions = min(loaded.max_model_len, target.max_model_len)
    num_seats, blocks_per_seat = cache_size(num_positions, size, placement.block_bytes)
    runner = placement.make_runner(num_seats * blocks_per_seat, loaded.max_model_len)
    return DraftModel(loaded, runner, num_seats, blocks_per_seat, size)
