"""The names in `transformers` are read once for each installation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from batchline.checkpoints.model_listing import Names, _remembering

NAMES: Names = {
    frozenset(): {"llama.configuration_llama": {"LlamaConfig"}},
    frozenset({"torch", "vision"}): {"llama.modeling_llama": {"LlamaModel", "LlamaForCausalLM"}},
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models, and an empty state folder."""
    monkeypatch.setenv("BATCHLINE_STATE_DIR", str(tmp_path / "state"))
    folder = tmp_path / "transformers" / "models"
    (folder / "llama").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "llama" / "modeling_llama.py").write_text("class LlamaModel: ...")
    return folder


def counting(calls: list[str]) -> Callable[..., Names]:
    def read(module_path: str, prefix: str | None = None) -> Names:
        calls.append(module_path)
        return {needs: {name: set(of) for name, of in by.items()} for needs, by in NAMES.items()}

    return _remembering(read)


def test_the_files_are_read_once(models: Path) -> None:
    calls: list[str] = []
    assert counting(calls)(str(models / "__init__.py")) == NAMES
    assert counting(calls)(str(models)) == NAMES  # as in the next process
    assert calls == [str(models)]


def test_a_prefix_is_added_to_modules_only(models: Path) -> None:
    assert counting([])(models, prefix="models") == {
        frozenset(): {"models.llama.configuration_llama": {"LlamaConfig"}},
        frozenset({"torch", "vision"}): {"models.llama.modeling_llama": {"LlamaModel", "LlamaForCausalLM"}},
    }


def test_callers_may_change_what_they_get(models: Path) -> None:
    names_of = counting([])
    names_of(str(models))[frozenset()].clear()
    assert names_of(str(models)) == NAMES


@pytest.mark.parametrize("change", ["edited", "added", "removed", "touched"])
def test_changed_files_are_read_again(models: Path, change: str) -> None:
    calls: list[str] = []
    counting(calls)(str(models))
    file = models / "llama" / "modeling_llama.py"
    if change == "edited":
        file.write_text("class LlamaForCausalLM: ...")
    elif change == "added":
        (models / "llama" / "tokenization_llama.py").write_text("")
    elif change == "removed":
        file.unlink()
    else:
        os.utime(file, ns=(0, 0))
    counting(calls)(str(models))
    assert len(calls) == 2


def test_bytecode_is_no_change(models: Path) -> None:
    calls: list[str] = []
    counting(calls)(str(models))
    (models / "llama" / "__pycache__").mkdir()
    (models / "llama" / "__pycache__" / "modeling_llama.pyc").write_bytes(b"code")
    counting(calls)(str(models))
    assert len(calls) == 1


DAMAGED = [b"", b"{", b"[]", b"\xff\xfe", b'[[[],{"llama.modeling_llama":["LlamaForCausalLM"]}]]', b"\n[]"]


@pytest.mark.parametrize("content", [*DAMAGED, None])
def test_a_damaged_record_is_replaced(models: Path, tmp_path: Path, content: bytes | None) -> None:
    """Bug: a record with other names than those of `transformers` broke every run, until someone deleted it. None: one
    letter is another one."""
    calls: list[str] = []
    counting(calls)(str(models))
    (record,) = (tmp_path / "state" / "transformers").iterdir()
    record.write_bytes(record.read_bytes().replace(b"LlamaModel", b"LlamaNodel") if content is None else content)
    for _ in range(2):
        assert counting(calls)(str(models)) == NAMES
    assert len(calls) == 2


def test_a_state_folder_that_cannot_be_written_costs_only_time(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHLINE_STATE_DIR", str(models / "__init__.py"))
    calls: list[str] = []
    for _ in range(2):
        assert counting(calls)(str(models)) == NAMES
    assert len(calls) == 2


def test_a_record_that_cannot_be_read_costs_only_time(models: Path) -> None:
    """Bug: no model could be loaded. `sudo` may have left a folder that only root reads."""
    calls: list[str] = []
    counting(calls)(str(models))
    with (
        patch.object(Path, "read_bytes", side_effect=PermissionError),
        patch.object(Path, "stat", side_effect=PermissionError),
    ):
        assert counting(calls)(str(models)) == NAMES
    assert len(calls) == 2


def test_other_folders_are_read_each_time(tmp_path: Path) -> None:
    calls: list[str] = []
    for _ in range(2):
        counting(calls)(str(tmp_path))
    assert calls == [str(tmp_path)] * 2


COMPARE = """
from batchline.checkpoints.model_listing import remembered_names
with remembered_names():
    import transformers
    from transformers import models
from transformers.utils import import_utils
patched = import_utils.define_import_structure
assert patched.__module__ == "batchline.checkpoints.model_listing", patched.__module__
original = patched.__closure__[0].cell_contents
folder = models.__path__[0] if hasattr(models, "__path__") else models.__file__.rpartition("/")[0]
print(patched(folder) == original(folder), patched(folder, "models") == original(folder, "models"))
print(transformers.LlamaConfig.__module__)
"""


def test_a_record_equals_what_transformers_reads(tmp_path: Path) -> None:
    env = {**os.environ, "BATCHLINE_STATE_DIR": str(tmp_path)}
    for _ in range(2):  # with and without a record
        command = [sys.executable, "-c", COMPARE]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
        assert done.stdout.split() == ["True", "True", "transformers.models.llama.configuration_llama"]
    assert len(list((tmp_path / "transformers").iterdir())) == 1
