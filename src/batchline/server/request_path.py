"""The path of a request, without what is optional in it: a proxy's prefix, another service's, and a slash at the end.

`PlainPath` is the outermost layer, so that all others (keys, admission, routes, metrics) see one form of each path.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.openai_api.endpoint_table import path_here


def route_path(scope: Scope) -> str:
    """The request's path without the prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class PlainPath:
    """Gives every path one form: with the prefix, without a slash at its end, and as it is called here if it is another
    service's. The model that such a path names is left in the request's state (`model_of_path`). ASGI middleware.

    The router and `route_path` leave the prefix out. A proxy may strip it from requests or not.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """prefix: `/api`, without a slash at its end; may be empty."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            path: str = scope["path"].removesuffix("/")
            if path == self._prefix or path.startswith(f"{self._prefix}/"):
                path = path.removeprefix(self._prefix)
            path, model = path_here(path or "/")
            state = {**scope.get("state", {}), "model_of_path": model}
            scope = {**scope, "root_path": self._prefix, "path": self._prefix + path, "state": state}
        await self._app(scope, receive, send)
