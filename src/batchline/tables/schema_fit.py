"""Whether an answer satisfies the parts of its JSON Schema that decide what a typed column may hold.

A service may ignore the schema, so the types of the columns do not suffice: a label outside the `enum` is a string,
too. Checked are `enum`, `const`, `required`, and a null where the schema has another type. Other keywords, such as
`minimum` or `pattern`, are not. Unions are not looked into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchline.tables.typed_columns import WrongType, quoted, resolved


def check_fit(value: Any, part: Any, root: Mapping[str, Any], path: str = "") -> None:
    """part: the schema of the value, in the schema root. path: the value's, for messages. Raises: WrongType."""
    part = resolved(part, root)
    if not isinstance(part, Mapping):
        return
    allowed = part.get("enum", [part["const"]] if "const" in part else None)
    if isinstance(allowed, list) and not any(_are_equal(value, one) for one in allowed):
        raise WrongType(f"{path} is not one of {quoted(allowed)}: {quoted(value)}")
    if isinstance(value, dict):
        _check_object(value, part, root, path)
    elif isinstance(value, list) and isinstance(part.get("items"), Mapping):
        for index, item in enumerate(value):
            check_fit(item, part["items"], root, f"{path}[{index}]")
    elif value is None and isinstance(part.get("type"), str) and part["type"] != "null":
        raise WrongType(f"{path} is null, and the schema wants {part['type']}")


def _check_object(value: Mapping[str, Any], part: Mapping[str, Any], root: Mapping[str, Any], path: str) -> None:
    before = f"{path}." if path else ""
    required, properties = part.get("required"), part.get("properties")
    for name in required if isinstance(required, list) else []:
        if name not in value:
            raise WrongType(f"{before}{name} is missing")
    for name, kind in properties.items() if isinstance(properties, Mapping) else []:
        if name in value:
            check_fit(value[name], kind, root, f"{before}{name}")


def _are_equal(value: Any, other: Any) -> bool:
    """As JSON compares: 1 equals 1.0, and neither equals true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
