"""Log-probabilities in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from batchline.endpoints.reporting import LogprobFormat
from batchline.engine.request import TokenLogprobs
from batchline.testing import ByteTokenizer

A, B, C, EOS = 65, 66, 67, ByteTokenizer.EOS
STYLE = LogprobFormat(ByteTokenizer())
TOP = ((A, -0.5), (B, -1.0), (C, float("-inf")))


def test_chat_entries_carry_true_bytes() -> None:
    half = TokenLogprobs(0xC3, -0.5, 1)
    end = TokenLogprobs(EOS, -0.1, 1)
    assert STYLE.chat([half, end], 0) == {
        "content": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": []},
            {"token": "</s>", "logprob": -0.1, "bytes": [60, 47, 115, 62], "top_logprobs": []},
        ]
    }


def test_chat_reports_as_many_alternatives_as_asked_for() -> None:
    token = TokenLogprobs(B, -1.0, 2, TOP)
    content = STYLE.chat([token], 1)["content"]
    assert content[0]["token"] == "B"
    assert content[0]["top_logprobs"] == [{"token": "A", "logprob": -0.5, "bytes": [A]}]
    assert len(STYLE.chat([token], -1)["content"][0]["top_logprobs"]) == 3


def test_the_impossible_is_a_finite_number() -> None:
    content = STYLE.chat([TokenLogprobs(C, float("-inf"), 3, TOP)], 3)["content"]
    assert content[0]["logprob"] == -9999.0
    assert content[0]["top_logprobs"][2]["logprob"] == -9999.0


def test_completion_lists_run_in_parallel() -> None:
    chosen = TokenLogprobs(C, -3.0, 3, TOP)
    assert STYLE.completion([None, chosen], [0, 1], [A, C], 2) == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -3.0],
        "tokens": ["A", "C"],
        "top_logprobs": [None, {"A": -0.5, "B": -1.0, "C": -3.0}],
    }


def test_of_tokens_with_the_same_text_the_likelier_counts() -> None:
    token = TokenLogprobs(0x81, -2.0, 2, ((0x80, -1.0), (0x81, -2.0)))
    assert STYLE.completion([token], [0], [0x81], 2)["top_logprobs"] == [{"\ufffd": -1.0}]


def test_tokens_can_be_written_as_ids() -> None:
    style = LogprobFormat(ByteTokenizer(), as_token_ids=True)
    token = TokenLogprobs(A, -0.5, 1, TOP[:2])
    assert style.completion([token], [0], [A], 2)["tokens"] == ["token_id:65"]
    assert style.completion([token], [0], [A], 2)["top_logprobs"] == [{"token_id:65": -0.5, "token_id:66": -1.0}]
    entry = style.chat([token], 1)["content"][0]
    assert (entry["token"], entry["top_logprobs"][0]["token"], entry["bytes"]) == ("token_id:65", "token_id:65", [65])


def test_prompt_entries_hold_the_token_itself_and_the_likeliest_with_ranks() -> None:
    token = TokenLogprobs(C, -7.0, 9, TOP[:2])
    assert STYLE.prompt([None, token], 2) == [
        None,
        {
            "67": {"logprob": -7.0, "rank": 9, "decoded_token": "C"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            "66": {"logprob": -1.0, "rank": 2, "decoded_token": "B"},
        },
    ]
    assert STYLE.prompt([token], 0) == [{"67": {"logprob": -7.0, "rank": 9, "decoded_token": "C"}}]
