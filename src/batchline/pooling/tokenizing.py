"""A pooling model's own way from text, or a pair of texts, to token ids.

Owns the model's prompts and special tokens; knows nothing of limits: callers say how long a sequence may be, and
without a limit nothing is cut. Callable from any thread; a tokenizer's truncation is state, hence the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from batchline.pooling.batching import TokenSequence

Role = Literal["query", "document"]
"""What a text is in a search; a model may have a prompt of its own for each."""

ROLE_PROMPTS: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of prompts by role, the first that a model has being used (as `encode_query` and `encode_document` do)."""


WritePair = Callable[[str, str, str], str]
"""From the model's prompt and the two texts of a pair to the text that holds them."""


class PoolingTokenizer:
    """Text to `TokenSequence`s, as the model was trained with.

    takes_whole_pairs: whether pairs are written by a template and cannot be cut.
    num_special_tokens, num_pair_special_tokens: what is added around a text or a pair.
    """

    def __init__(self, tokenizer: Any, *, excludes_prompt: bool = False, write_pair: WritePair | None = None) -> None:
        """tokenizer: of transformers. excludes_prompt: whether pooling leaves prompt tokens out. write_pair: of a model
        that wants pairs as one text."""
        self._write_pair = write_pair
        self.takes_whole_pairs = write_pair is not None
        self._tokenizer = tokenizer
        self._excludes_prompt = excludes_prompt
        self._lock = threading.Lock()
        self.num_special_tokens = int(tokenizer.num_special_tokens_to_add(pair=False))
        self.num_pair_special_tokens = 0 if write_pair else int(tokenizer.num_special_tokens_to_add(pair=True))

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[TokenSequence]:
        """One sequence per text, `prompt` in front of each, the text's end cut to fit `max_tokens`."""
        num_prompt_tokens = self._count_prompt_tokens(prompt, add_special_tokens)
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        return self._tokenize(prompted, None, add_special_tokens, max_tokens, num_prompt_tokens)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, prompt: str = "", max_tokens: int | None = None
    ) -> list[TokenSequence]:
        """One sequence per pair, `prompt` in front of the first text, the longer of the two cut first.

        max_tokens: None where the tokenizer `takes_whole_pairs`.
        """
        if self._write_pair is not None:
            return self._tokenize([self._write_pair(prompt, *pair) for pair in pairs], None, False, None, 0)
        firsts = [prompt + first for first, _ in pairs]
        seconds = [second for _, second in pairs]
        return self._tokenize(firsts, seconds, True, max_tokens, 0)

    def _count_prompt_tokens(self, prompt: str, add_special_tokens: bool) -> int:
        """Leading tokens that pooling must leave out: the prompt's own and the special ones before it."""
        if not (prompt and self._excludes_prompt):
            return 0
        (alone,) = self._tokenize([prompt], None, add_special_tokens, None, 0)
        ends_special = alone.token_ids[-1] in self._tokenizer.all_special_ids
        return len(alone) - 1 if ends_special else len(alone)

    def _tokenize(
        self,
        firsts: list[str],
        seconds: list[str] | None,
        add_special_tokens: bool,
        max_tokens: int | None,
        num_prompt_tokens: int,
    ) -> list[TokenSequence]:
        with self._lock:
            encoded = self._tokenizer(
                firsts,
                seconds,
                add_special_tokens=add_special_tokens,
                truncation="longest_first" if max_tokens is not None else False,
                max_length=max_tokens,
                return_attention_mask=False,
                verbose=False,
            )
        type_rows = encoded.get("token_type_ids") or [None] * len(firsts)
        return [
            TokenSequence(
                token_ids=tuple(token_ids),
                token_type_ids=tuple(type_ids) if type_ids and any(type_ids) else None,
                num_prompt_tokens=num_prompt_tokens,
            )
            for token_ids, type_ids in zip(encoded["input_ids"], type_rows, strict=True)
        ]
