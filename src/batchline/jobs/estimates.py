"""What a batch is expected to take, at the rates at which this machine has run its model.

Tokens of prompts are guessed from characters while the file is checked, because counting them would take as long as
some batches. Each finished batch shows how wrong the guess is, and corrects it for later ones. Without a measurement of
the model there is no estimate of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from batchline.batch.media import media_of
from batchline.batch.rates import MIN_RUN_TIME_S, MeasuredRun, work_of
from batchline.batch.tokens import CharacterCounter, TokenCounts

HALF_LIFE_S = 600.0
"""After so much time with batches, what was measured counts half."""

LONGEST_GAP_S = 5.0
"""Reports of progress further apart than this are of different times of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What all requests of a batch take. None for what is not known. seconds: if it has the machine to itself."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None


class FileMeasure:
    """Adds up what the lines of a batch ask for; a `check.LineObserver`."""

    def __init__(self) -> None:
        self._count = CharacterCounter()
        self._models: set[str] = set()
        self._is_countable = True

    @property
    def counts(self) -> TokenCounts:
        """The sums."""
        return self._count.counts

    @property
    def model(self) -> str | None:
        """The only model; None if there are several, or if a line has media, whose tokens only the model knows."""
        return next(iter(self._models)) if self._is_countable and len(self._models) == 1 else None

    def __call__(self, position: int, url: str, body: dict[str, Any]) -> None:
        """Count a line."""
        self._models.add(body["model"])
        try:
            self._count(position, url, body)
            self._is_countable &= not media_of(url, body)
        except Exception:  # the boundary of one line: nobody has checked its body
            self.counts.uncounted += 1


@dataclass(slots=True)
class Pace:
    """How fast one model's batches went lately. Mutable; what it counts fades, see `HALF_LIFE_S`.

    guessed_tokens, counted_tokens: of the prompts of whole batches, by their characters and by the model.
    """

    busy_s: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    guessed_tokens: float = 0.0
    counted_tokens: float = 0.0
    latest: float | None = None
    latest_totals: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def estimate(self, counts: TokenCounts) -> Estimate:
        """What a file with these sums takes."""
        tokens_per_guess = self.counted_tokens / self.guessed_tokens if self.guessed_tokens else 1.0
        prompt = round(counts.prompt * tokens_per_guess)
        is_measured = self.busy_s >= MIN_RUN_TIME_S and self.requests > 0
        usual = self.output_tokens / self.requests if is_measured else None
        expected = counts.expected_output(usual)
        measured = work_of(self.prompt_tokens, self.output_tokens)
        if not is_measured or expected is None or not measured:
            output = None if expected is None else round(expected)
            return Estimate(input_tokens=prompt, output_tokens=output)
        return Estimate(
            input_tokens=prompt,
            output_tokens=round(expected),
            seconds=self.busy_s * work_of(prompt, expected) / measured,
        )

    def note_totals(self, batch_id: str, totals: tuple[int, int, int], now: float) -> None:
        """A running batch has so many requests, prompt tokens and output tokens behind it, copies not included."""
        before = self.latest_totals.get(batch_id)
        self.latest_totals[batch_id] = totals
        elapsed_s = 0.0 if self.latest is None or now - self.latest > LONGEST_GAP_S else now - self.latest
        self.latest = now
        kept = 0.5 ** (elapsed_s / HALF_LIFE_S)
        new = (0, 0, 0) if before is None else tuple(a - b for a, b in zip(totals, before, strict=True))
        self.busy_s = kept * self.busy_s + elapsed_s
        self.requests = kept * self.requests + new[0]
        self.prompt_tokens = kept * self.prompt_tokens + new[1]
        self.output_tokens = kept * self.output_tokens + new[2]

    def note_end(self, batch_id: str) -> None:
        """A batch no longer runs."""
        self.latest_totals.pop(batch_id, None)

    def note_prompts(self, guessed: int, counted: int) -> None:
        """How many tokens the prompts of a whole batch have, by their characters and by the model."""
        self.guessed_tokens = self.guessed_tokens / 2 + guessed
        self.counted_tokens = self.counted_tokens / 2 + counted


class Paces:
    """The pace of each model, by the name that requests use."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._paces: dict[str, Pace] = {}

    def of(self, model: str) -> Pace:
        """The pace of a model; empty if it is new."""
        return self._paces.setdefault(model, Pace())

    def begin_with(self, measured: Mapping[str, MeasuredRun]) -> None:
        """Start from earlier measurements of this machine, for models that have not been measured since."""
        for model, run in measured.items():
            pace = self.of(model)
            if not pace.busy_s:
                pace.busy_s, pace.requests = run.run_time_s, run.requests
                pace.prompt_tokens, pace.output_tokens = run.prompt_tokens, run.output_tokens
