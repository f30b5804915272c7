"""What a case of a parameter is, and how answers are looked at."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchline.text.tokenizer import load_tokenizer

Json = dict[str, Any]
Check = Callable[[Json, Json], bool]

MODELS = Path(__file__).parents[2] / "examples/models"
TOKENIZER = load_tokenizer(str(MODELS / "tiny-chat"))


@dataclass(frozen=True)
class Case:
    """parameter: what is tried. base: a body without it; added: the fields that try it.

    holds: whether the bodies of the answers, with it and without it, differ as they should.
    """

    parameter: str
    url: str
    base: Json
    added: Json
    holds: Check

    @property
    def name(self) -> str:
        return f"{self.url.removeprefix('/v1/')} {self.parameter}={str(self.added.get(self.parameter))[:30]}"


def token_id(text: str) -> int:
    """The id of a text that is one token."""
    (found,) = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def text(body: Json, choice: int = 0) -> str:
    told = body["choices"][choice]
    return str(told["message"]["content"] if "message" in told else told["text"])


def texts(body: Json) -> list[str]:
    return [text(body, choice) for choice in range(len(body["choices"]))]


def finish(body: Json) -> tuple[str, Any]:
    return body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]


def num_prompt(body: Json) -> int:
    return int(body["usage"]["prompt_tokens"])


def num_generated(body: Json) -> int:
    return int(body["usage"]["completion_tokens"])


def generated(body: Json) -> list[int]:
    return list(body["choices"][0]["token_ids"])


def prompt_text(body: Json) -> str:
    """The prompt as the model saw it, of a chat answer with `return_token_ids`."""
    return b"".join(TOKENIZER.token_bytes(token) for token in body["prompt_token_ids"]).decode()


def refused(parameter: str, message: str = "") -> Check:
    """The answer is an error that names the parameter; without it there is none."""

    def check(new: Json, old: Json) -> bool:
        error = new["error"]
        is_named = error["param"].startswith(parameter) and parameter in error["message"]
        return is_named and re.search(message, error["message"]) is not None and "error" not in old

    return check
