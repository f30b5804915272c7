"""The small files of a model on the hub are asked for once, and a hub that did not answer is asked again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from batchline.checkpoints.files import read_json
from batchline.checkpoints.formats import refuse_foreign_format
from batchline.errors import ModelLoadError


class FakeHub:
    """A hub with one repository whose only file is a config.json. asked: how often for each file of each revision."""

    def __init__(self, folder: Path) -> None:
        self.is_reachable = True
        self.asked = Counter[tuple[str, str | None]]()
        self.config = folder / "config.json"

    def hf_hub_download(self, model: str, name: str, *, revision: str | None) -> str:
        self.asked[name, revision] += 1
        if not self.is_reachable:
            raise LocalEntryNotFoundError("cannot find the requested file in the local cache, and the hub is down")
        if name != "config.json":
            raise EntryNotFoundError(name)
        self.config.write_text('{"architectures": ["LlamaForCausalLM"]}')
        return str(self.config)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
    return hub


def test_the_hub_is_asked_once_for_each_file_of_a_revision(hub: FakeHub) -> None:
    """Bug: the checks before and at loading asked for the same five files each, and others for the config again."""
    for revision in (None, None, "v1", "v1"):
        refuse_foreign_format("someone/asked-once", revision)
        assert read_json("someone/asked-once", "config.json", revision) == {"architectures": ["LlamaForCausalLM"]}
    assert len(hub.asked) == 10
    assert set(hub.asked.values()) == {1}


def test_a_hub_that_did_not_answer_is_asked_again(hub: FakeHub) -> None:
    hub.is_reachable = False
    with pytest.raises(ModelLoadError, match="cannot be reached"):
        read_json("someone/asked-again", "config.json")
    hub.is_reachable = True
    assert read_json("someone/asked-again", "config.json") is not None


def test_a_file_that_has_gone_from_the_cache_is_downloaded_again(hub: FakeHub) -> None:
    assert read_json("someone/gone", "config.json") is not None
    hub.config.unlink()
    assert read_json("someone/gone", "config.json") is not None
    assert hub.asked["config.json", None] == 2
