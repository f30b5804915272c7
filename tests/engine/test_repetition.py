"""An output that repeats itself is noticed at the token that completes the repetition, as by a plain search."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.engine.repetition import Repetition, RepetitionTracker
from batchline.engine.request import GenerationRequest, SamplingParams
from batchline.engine.sequence import Sequence


def end_of(output: list[int], wanted: Repetition, prompt: tuple[int, ...] = ()) -> int | None:
    """After how many tokens of the output the tracker notices a repetition."""
    tracker = RepetitionTracker(wanted)
    for number in range(1, len(output) + 1):
        if tracker.push(array("q", [*prompt, *output[:number]]), number):
            return number
    return None


def searched_end(output: list[int], wanted: Repetition) -> int | None:
    for number in range(1, len(output) + 1):
        for size in range(wanted.min_size, wanted.max_size + 1):
            if number >= size * wanted.count and output[number - size * wanted.count : number] == (
                output[number - size : number] * wanted.count
            ):
                return number
    return None


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(2, 4),
)
def test_the_first_repetition_is_found(output: list[int], min_size: int, more: int, count: int) -> None:
    wanted = Repetition(min_size=min_size, max_size=min_size + more, count=count)
    assert end_of(output, wanted) == searched_end(output, wanted)


def test_the_prompt_does_not_count() -> None:
    wanted = Repetition(min_size=1, max_size=3, count=3)
    assert end_of([5, 5], wanted, prompt=(5, 5, 5, 5)) is None
    assert end_of([5, 5, 5], wanted, prompt=(5, 5, 5, 5)) == 3


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 4), (7, 7)])
def test_a_sequence_that_repeats_itself_ends_after_its_minimum(min_tokens: int, length: int) -> None:
    repetition = Repetition(min_size=2, max_size=2, count=2)
    sampling = SamplingParams(max_tokens=20, min_tokens=min_tokens, repetition=repetition)
    sequence = Sequence(GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=sampling), seed=0)
    while not sequence.is_finished:
        sequence.append(3 + sequence.num_output_tokens % 2)
    assert (sequence.finish_reason, sequence.num_output_tokens) == ("repetition", length)
