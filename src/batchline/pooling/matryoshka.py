"""Finds out whether a model's embeddings may be shortened, and to which sizes.

A vector may only be shortened if the model was trained for it. Its files say so in one of these ways:

- `config.json` or `config_sentence_transformers.json` has `matryoshka_dimensions`, a list of the only allowed sizes, or
  `is_matryoshka: true`, which allows any size
- `config_sentence_transformers.json` has `truncate_dim`
- the metadata of `README.md` has the tag `matryoshka` or `loss:MatryoshkaLoss`, as sentence-transformers writes it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchline.checkpoints.files import read_json, read_text
from batchline.errors import ModelLoadError

README_TAGS = frozenset({"matryoshka", "loss:matryoshkaloss"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Matryoshka:
    """The sizes that an embedding may be shortened to, up to `full`. sizes: None allows any size."""

    full: int
    sizes: frozenset[int] | None = None

    def allows(self, dimensions: int) -> bool:
        """Whether an embedding may have this many dimensions."""
        if dimensions == self.full:
            return True
        return 1 <= dimensions < self.full and (self.sizes is None or dimensions in self.sizes)

    def describe(self) -> str:
        """The allowed sizes, as text for a user."""
        if self.sizes is None:
            return f"1 to {self.full}"
        return ", ".join(str(size) for size in sorted(self.sizes | {self.full}))


def read_matryoshka(
    model: str, revision: str | None, *, full: int, overrides: Mapping[str, Any] | None = None
) -> Matryoshka | None:
    """The sizes that the model's files allow; None if they do not mention Matryoshka training. Raises: ModelLoadError.

    overrides: values that override config.json.
    """
    declarations = [
        {**(read_json(model, "config.json", revision) or {}), **(overrides or {})},
        read_json(model, "config_sentence_transformers.json", revision) or {},
    ]
    for declared in declarations:
        sizes = declared.get("matryoshka_dimensions")
        if sizes:
            return Matryoshka(full=full, sizes=_checked_sizes(model, sizes))
    is_declared = any(
        declared.get("is_matryoshka") is True or declared.get("truncate_dim") for declared in declarations
    )
    if is_declared or README_TAGS & set(_readme_tags(read_text(model, "README.md", revision) or "")):
        return Matryoshka(full=full)
    return None


def _checked_sizes(model: str, sizes: Any) -> frozenset[int]:
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelLoadError(model, "matryoshka_dimensions in its configuration is not a list of positive integers")
    return frozenset(sizes)


def _readme_tags(text: str) -> Iterator[str]:
    """Lower-case tags of a model card's metadata: the `tags:` list between the leading `---` lines."""
    lines = iter(text.splitlines())
    if next(lines, "").strip() != "---":
        return
    in_tags = False
    for line in lines:
        if line.strip() == "---":
            return
        if line[:1] not in (" ", "-"):
            in_tags = line.strip() == "tags:"
        elif in_tags:
            yield line.strip().removeprefix("-").strip().strip("'\"").lower()
