"""Turns token ids into text, step by step.

The concatenated steps equal the text of all tokens at once. Bytes go through an incremental UTF-8 decoder, so a
character that spans several tokens comes out with its last one, and bytes that form no character become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from batchline.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence as its tokens arrive. Mutable, one per sequence.

    kept_special_ids: special tokens that are not skipped, because a parser needs them.
    is_continuation: the tokens follow others (a prompt), so the first one keeps its leading space.
    spaces_between_special_tokens: some decoders put a space before every token; False removes it between two added
    tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        kept_special_ids: Collection[int] = (),
        is_continuation: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._kept_special_ids = kept_special_ids
        self._skip_special_tokens = skip_special_tokens
        self._joins_added_tokens = not (skip_special_tokens or spaces_between_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = not is_continuation
        self._was_added_token = False

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        is_skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        if is_skipped and token_id not in self._kept_special_ids:
            return ""
        return self._utf8.decode(self._bytes(token_id))

    def flush(self) -> str:
        """The remaining text when no more tokens follow: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        added = self._tokenizer.added_token(token_id)
        joins = self._joins_added_tokens and added is not None and self._was_added_token
        self._was_added_token = added is not None
        if joins and added is not None:
            return added.encode()
        token_bytes = self._tokenizer.token_bytes(token_id, is_first=self._is_first)
        if self._is_first and self._tokenizer.token_bytes(token_id):
            self._is_first = False
        return token_bytes


def detokenize(
    tokenizer: Tokenizer,
    token_ids: Iterable[int],
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> str:
    """The text of all tokens at once."""
    detokenizer = Detokenizer(
        tokenizer,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
    )
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
