"""A backend whose requests are answered by replicas on a Ray cluster: equal backends in actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchline.backends.in_process import InProcessBackend
from batchline.backends.processes.backend import ProcessBackend
from batchline.backends.processes.config import ProcessConfig
from batchline.backends.ray.actors import ActorLauncher, MakeBackend
from batchline.backends.ray.config import RayConfig
from batchline.backends.replicas.backend import PoolBackend
from batchline.config import EngineConfig


class RayBackend(PoolBackend):
    """Replicas of the backend that `make_backend` makes, as actors."""

    def __init__(self, make_backend: MakeBackend, config: RayConfig, folders: Sequence[str] = ()) -> None:
        """folders: of models, which every machine needs. Raises: UsageError, as `make_backend`."""
        launcher = ActorLauncher(make_backend, config, folders)
        super().__init__(make_backend({}), launcher, config.size, config.patience_s)


def replicated(engines: Sequence[EngineConfig], config: RayConfig) -> RayBackend:
    """Replicas of the embedded engine. Raises: UsageError."""
    if all(engine.model.device == "cpu" for engine in engines):
        config = replace(config, num_gpus=config.num_gpus or 0.0)
    folders = [path for engine in engines for path in (engine.model.model, engine.model.tokenizer) if path]
    return RayBackend(partial(_embedded, [_in_actor(engine, config) for engine in engines]), config, folders)


def on_engines(engine: ProcessConfig, config: RayConfig) -> RayBackend:
    """Replicas of another project's engine, each a child process of its actor. Raises: UsageError."""
    engine = replace(engine, model=_with_template_text(engine.model), log_folder=None)
    folders = [path for path in (engine.model.model.model, engine.model.model.tokenizer) if path]
    return RayBackend(partial(_on_engine, engine), config, folders)


def _on_engine(engine: ProcessConfig, paths: Mapping[str, str]) -> ProcessBackend:
    """The settings are made anew, because they remember what they have found on the driver's machine."""
    return ProcessBackend(replace(engine, model=_at(engine.model, paths)))


def _embedded(engines: Sequence[EngineConfig], paths: Mapping[str, str]) -> InProcessBackend:
    """paths: where the folders of models are on the machine of the replica."""
    return InProcessBackend([_at(engine, paths) for engine in engines])


def _at(engine: EngineConfig, paths: Mapping[str, str]) -> EngineConfig:
    """The same engine with the folders of its machine, under the same names."""
    model = engine.model
    tokenizer = None if model.tokenizer is None else paths.get(model.tokenizer, model.tokenizer)
    there = replace(model, model=paths.get(model.model, model.model), tokenizer=tokenizer, served_names=model.names)
    return replace(engine, model=there)


def _in_actor(engine: EngineConfig, config: RayConfig) -> EngineConfig:
    """The engine's settings in an actor, with its share of the machine's processors, and without the folder of this
    run."""
    num_threads = engine.model.num_threads or max(1, int(config.num_cpus))
    return replace(
        _with_template_text(engine),
        model=replace(engine.model, num_threads=num_threads),
        media=replace(engine.media, cache_folder=None),
    )


def _with_template_text(engine: EngineConfig) -> EngineConfig:
    """The same engine with its chat template as text instead of as a path here."""
    template = engine.text.chat_template
    if template is None or not Path(template).is_file():
        return engine
    return replace(engine, text=replace(engine.text, chat_template=Path(template).read_text(encoding="utf-8")))
