"""The models that a backend serves, by the names that requests may use."""

from __future__ import annotations

from collections.abc import Sequence

from batchline.backends.base import ServedModel
from batchline.errors import BadRequest, NotFound


def models_by_name(models: Sequence[ServedModel]) -> dict[str, ServedModel]:
    """Every name, aliases too."""
    return {name: model for model in models for name in (model.name, *model.aliases)}


def find_model(models: Sequence[ServedModel], name: object) -> ServedModel:
    """The model of that name. Raises: BadRequest where it is no name, NotFound."""
    by_name = models_by_name(models)
    served = f"Served here: {', '.join(sorted(by_name))}"
    if not isinstance(name, str):
        raise BadRequest(f"model: it must be the name of a model. {served}", param="model")
    if name not in by_name:
        message = f"The model {name[:200]!r} does not exist. {served}"
        raise NotFound(message, param="model", code="model_not_found")
    return by_name[name]


def check_supported(models: Sequence[ServedModel], name: object, path: str) -> None:
    """The model of that name can answer requests to `path`. Raises: BadRequest, NotFound."""
    model = find_model(models, name)
    if path not in model.endpoints:
        supported = ", ".join(model.endpoints)
        raise BadRequest(f"Model {name} does not support {path}. It supports: {supported}", param="url")
