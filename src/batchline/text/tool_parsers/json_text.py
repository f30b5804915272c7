"""Reads and writes JSON text, as strictly as clients will read it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from batchline.text.text_cursor import UnexpectedText


def strict_loads(text: str) -> Any:
    """The value of a JSON text. Raises: UnexpectedText if it is not JSON; NaN and infinities are not."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:
        raise UnexpectedText("not JSON") from exc


def json_string(text: str) -> str:
    """A string as JSON text that can be encoded: lone surrogates are escaped, other characters stay readable."""
    has_surrogates = any("\ud800" <= character <= "\udfff" for character in text)
    return json.dumps(text, ensure_ascii=has_surrogates)


def _refuse(constant: str) -> NoReturn:
    raise UnexpectedText(f"{constant} is not JSON")
