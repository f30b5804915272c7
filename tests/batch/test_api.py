from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from batch_files import chat_line, contents, read_lines, write_lines

from batchline import run_batch
from batchline.backends.base import EndpointRequest
from batchline.errors import BackendUnavailable, ResumeRefused, RunFailed, UsageError
from batchline.testing import FakeBackend

TINY_CHAT = Path(__file__).parents[2] / "examples/models/tiny-chat"


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [chat_line("a", "one"), chat_line("b", "two")])


def test_run_batch_returns_the_summary(batch: Path, tmp_path: Path) -> None:
    summary = run_batch(batch, tmp_path / "out.jsonl", backend=FakeBackend())
    assert (summary.requests, summary.succeeded, summary.prefix_cache_hit_rate) == (2, 2, 0.0)
    assert contents(read_lines(tmp_path / "out.jsonl")) == {"a": "one", "b": "two"}


def test_file_names_need_not_be_text(batch: Path, tmp_path: Path) -> None:
    source, target = (Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/in\xff", b"/out\xff"))
    batch.rename(source)
    (tmp_path / "staging").mkdir()
    summary = run_batch(source, target, tmp_dir=tmp_path / "staging", backend=FakeBackend())
    assert summary.output == str(target)
    assert contents(read_lines(target)) == {"a": "one", "b": "two"}


def test_a_run_that_another_backend_began_is_not_continued(batch: Path, tmp_path: Path) -> None:
    """Any two backends that were given as objects counted as the same, and their answers were mixed in one file."""
    asked: list[EndpointRequest] = []

    async def answer_one(request: EndpointRequest) -> None:
        asked.append(request)
        if len(asked) > 1:
            raise BackendUnavailable("gone")

    with pytest.raises(RunFailed):
        run_batch(batch, tmp_path / "out", backend=FakeBackend(before_answer=answer_one), max_inflight=1)
    with pytest.raises(ResumeRefused, match="backend was fake, serving fake, is now fake, serving other"):
        run_batch(batch, tmp_path / "out", backend=FakeBackend("other"))
    assert run_batch(batch, tmp_path / "out", backend=FakeBackend()).resumed == 1


async def test_run_batch_works_where_an_event_loop_runs(batch: Path, tmp_path: Path) -> None:
    assert run_batch(batch, tmp_path / "out.jsonl", backend=FakeBackend()).succeeded == 2


def test_run_batch_wants_a_model_or_a_backend(batch: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="either a model or a backend"):
        run_batch(batch, tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="either a model or a backend"):
        run_batch(batch, tmp_path / "out.jsonl", model="m", backend=FakeBackend())


def test_a_model_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no model at"):
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=str(tmp_path / "none"))


def test_served_names_are_one_for_each_model(batch: Path, tmp_path: Path) -> None:
    models = [str(TINY_CHAT), str(TINY_CHAT.with_name("tiny-embed"))]
    with pytest.raises(UsageError, match="1 names for 2 models"):
        run_batch(batch, tmp_path / "out.jsonl", model=models, served_model_name="one")


def test_importing_it_loads_no_model_library() -> None:
    code = (
        "import sys, batchline, batchline.batch.api, batchline.cli.main; from batchline import run_batch; "
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"
