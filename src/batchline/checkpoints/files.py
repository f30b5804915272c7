"""Reads the small files of a model: from a local folder, or from the hub and its cache. No torch, no transformers.

`reading` is the one place where exceptions of the libraries that read a model's files are translated.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from batchline.errors import BatchlineError, ModelLoadError, short_reason

logger = logging.getLogger(__name__)

CONFIG_UNUSABLE = "its config.json is not usable"


def hub_unreachable() -> str:
    """Why a name is no model, as text for the user."""
    from huggingface_hub.constants import HF_HUB_OFFLINE  # a local folder needs no hub client

    offline = " (HF_HUB_OFFLINE is set: only models that are already downloaded are found)" if HF_HUB_OFFLINE else ""
    return (
        "there is no such folder, and the model hub does not have it or cannot be reached; "
        f"use the path of a downloaded model folder, or check the name and the network{offline}"
    )


@contextmanager
def reading(model: str, fault: str = "the folder is not a usable Hugging Face model") -> Iterator[None]:
    """Run other libraries' code on a model's files. fault: begins the sentence about an exception.

    That code may raise anything for damaged files, even a PanicException, which is no Exception. The log gets the
    traceback at level debug. Raises: ModelLoadError.
    """
    try:
        yield
    except (BatchlineError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:
        logger.debug("reading %s failed", model, exc_info=exc)
        raise ModelLoadError(model, why_not_loaded(model, exc, fault)) from exc


def why_not_loaded(model: str, exc: BaseException, fault: str) -> str:
    """Why a model could not be loaded, as text for the user. fault: see `reading`; only said of local files."""
    if os.path.exists(model):
        return f"{fault} ({short_reason(exc)})"
    if os.path.sep in model and (model.startswith((".", "~", os.path.sep)) or model.count("/") > 1):
        return "no such folder"
    return hub_unreachable() if isinstance(exc, OSError) else short_reason(exc)


def read_json(model: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """A JSON object of the model's folder or hub repository; None if it has no such file.

    A list (such as `modules.json`) is returned under the key `items`. Raises: ModelLoadError.
    """
    text = read_text(model, name, revision)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ModelLoadError(model, f"its {name} is not JSON ({exc})") from exc
    return value if isinstance(value, dict) else {"items": value}


def read_text(model: str, name: str, revision: str | None = None) -> str | None:
    """A text file of the model's folder or hub repository; None if it has no such file. Raises: ModelLoadError."""
    if os.path.isdir(model):
        path = Path(model, name)
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    path_on_hub = _fetch(model, name, revision)
    return None if path_on_hub is None else Path(path_on_hub).read_text(encoding="utf-8", errors="replace")


def _fetch(model: str, name: str, revision: str | None) -> str | None:
    """The local copy of a file of a hub repository; None if the repository has none. Raises: ModelLoadError."""
    # imported here, because a local folder needs no hub client
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = _ask_hub(model, name, revision)
        if path is not None and not os.path.isfile(path):  # the cache was emptied in the meantime
            _ask_hub.cache_clear()
            path = _ask_hub(model, name, revision)
        return path
    except LocalEntryNotFoundError as exc:
        if _is_cached(model, revision):
            return None  # offline, and the cached snapshot lacks this file
        raise ModelLoadError(model, hub_unreachable()) from exc
    except HFValidationError as exc:
        raise ModelLoadError(model, "no such folder") from exc
    except OSError as exc:  # unknown repository, no access, or no network: all of the hub client's own errors
        raise ModelLoadError(model, hub_unreachable()) from exc


@functools.cache
def _ask_hub(model: str, name: str, revision: str | None) -> str | None:
    """Ask the hub for a file, once per process: loading a model reads many, and each request is a round trip.

    Raises: OSError, HFValidationError.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return hf_hub_download(model, name, revision=revision)
    except LocalEntryNotFoundError:
        raise  # the hub did not answer
    except EntryNotFoundError:
        return None


def _is_cached(model: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str)


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """The folder of the model's files on this machine; None for a hub id that was not downloaded."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def hub_commit(model: str, revision: str | None = None) -> str | None:
    """The commit of a hub id's files: the revision's newest, or the one in the cache if the hub cannot be reached."""
    with suppress(ModelLoadError):
        read_text(model, "config.json", revision)  # asks the hub, and downloads the file if it is new
    folder = local_folder(model, revision)
    return None if folder is None else folder.name
