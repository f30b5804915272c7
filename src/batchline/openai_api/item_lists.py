"""Lists of items that clients read page by page: what a page is asked for with, and its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchline.errors import BadRequest

JsonObject = dict[str, Any]


class ListParams(BaseModel):
    """A list's query parameters, which arrive as text. after: the id of the last item of the page before."""

    model_config = ConfigDict(frozen=True)

    limit: Annotated[int, Field(ge=1, le=100, description="How many items a page has at most")] = 20
    order: Annotated[Literal["asc", "desc"], Field(description="`desc`: the newest first")] = "desc"
    after: Annotated[str, Field(description="The id of the last item of the page before")] | None = None


def list_page(items: Sequence[JsonObject], params: ListParams) -> JsonObject:
    """A page of `items`, which are the oldest first and have each an `id`. Raises: BadRequest."""
    ordered = list(items) if params.order == "asc" else list(reversed(items))
    start = 0
    if params.after is not None:
        ids = [item["id"] for item in ordered]
        if params.after not in ids:
            raise BadRequest(f"after: there is no item with id {params.after[:200]!r}", param="after")
        start = ids.index(params.after) + 1
    data = ordered[start : start + params.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + len(data) < len(ordered),
    }
