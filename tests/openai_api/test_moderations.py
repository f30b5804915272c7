"""Which labels are categories of harm, and what a moderation request takes."""

from __future__ import annotations

from typing import Any

import pytest

from batchline.config import RequestLimits
from batchline.errors import BadRequest
from batchline.openai_api.moderations import ModerationsRequest, harmful_labels, moderation_object
from batchline.openai_api.parsing import parse_body


@pytest.mark.parametrize(
    ("labels", "is_exclusive", "harmful"),
    [
        (["toxic", "insult", "threat"], False, {0, 1, 2}),
        (["OK", "H", "V", "S"], True, {1, 2, 3}),
        (["toxic", "neutral"], True, {0}),
        (["INJECTION", "SAFE"], True, {0}),
        (["hate", "nothate"], True, {0}),
        (["non-toxic", "toxic"], True, {1}),
        (["offensive", "not_offensive"], True, {0}),
        (["LABEL_0", "LABEL_1"], True, {1}),
        (["human", "spam"], True, {1}),
        (["LABEL_0", "LABEL_1"], False, {0, 1}),
        (["LABEL_0"], False, {0}),
        (["angry", "sad", "afraid"], True, {0, 1, 2}),
    ],
)
def test_labels_that_say_safe_are_no_categories(labels: list[str], is_exclusive: bool, harmful: set[int]) -> None:
    assert harmful_labels(labels, is_exclusive=is_exclusive) == {index: labels[index] for index in harmful}


def test_a_text_is_flagged_if_one_category_reaches_the_threshold() -> None:
    rows = [[0.2, 0.5, 0.3], [0.9, 0.05, 0.05]]
    answer = moderation_object(moderation_id="m", model="x", categories={1: "hate", 2: "spam"}, rows=rows)
    assert answer["results"][0] == {
        "flagged": True,
        "categories": {"hate": True, "spam": False},
        "category_scores": {"hate": 0.5, "spam": 0.3},
        "category_applied_input_types": {"hate": ["text"], "spam": ["text"]},
    }
    assert answer["results"][1]["flagged"] is False


def parsed(value: Any) -> tuple[str, ...]:
    return parse_body(ModerationsRequest, {"input": value}, strict=True, limits=RequestLimits()).input


def test_parts_are_one_text_and_strings_are_several() -> None:
    assert parsed("a") == ("a",)
    assert parsed(["a", "b"]) == ("a", "b")
    assert parsed([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == ("a\nb",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "input: Input should be text: images"),
        ([], "input: Input should be a string, a non-empty list"),
        ([1, 2], "input: Input should be a string, a non-empty list"),
        (["a", {"type": "text", "text": "b"}], "input: Input should be a string, a non-empty list"),
        ("\ud800", "input: Input should be valid Unicode"),
    ],
)
def test_other_inputs_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parsed(value)
