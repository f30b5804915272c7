"""Memory that large texts took goes back to the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchline import process_memory
from batchline.config import ModelConfig
from batchline.pooling.embedding import load_embedding_model
from batchline.text.tokenizer import LONG_TEXT, load_tokenizer

MODELS = Path(__file__).parents[1] / "examples/models"


def resident_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(process_memory._trim() is None, reason="only glibc keeps memory like this")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Bug: a prompt of 7.5 MB left the process 800 MB larger for good."""
    blocks = [bytearray(2000) for _ in range(100_000)]
    pins = blocks[::50]  # the C library cannot give back what is below them by itself
    blocks.clear()
    before = resident_bytes()
    process_memory.release_memory()
    assert resident_bytes() < before - 100_000_000
    assert len(pins) == 2000


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows when memory is given back; texts are huge if they have more than a few thousand characters."""
    calls: list[int] = []
    monkeypatch.setattr(process_memory, "HUGE_TEXT", LONG_TEXT)
    monkeypatch.setattr(process_memory, "_trim", lambda: calls.append)
    return calls


def test_a_huge_prompt_leaves_no_memory_behind(released: list[int]) -> None:
    tokenizer = load_tokenizer(str(MODELS / "tiny-chat"))
    tokenizer.encode("x" * (LONG_TEXT - 1), add_special_tokens=False)
    assert released == []
    assert len(tokenizer.encode("x" * LONG_TEXT, add_special_tokens=False)) > 0
    assert released == [0]


async def test_huge_texts_to_embed_leave_no_memory_behind(released: list[int]) -> None:
    model = load_embedding_model(ModelConfig(model=str(MODELS / "tiny-embed"), num_threads=1))
    try:
        model._tokenizer.encode(["x" * 100])
        assert released == []
        model._tokenizer.encode(["x" * LONG_TEXT, "y"])
        assert released == [0]
    finally:
        model.close()
