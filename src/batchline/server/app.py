"""Builds the application from the inside out: routes, admission, keys, boundary, CORS, the plain path."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchline.backends.base import Backend
from batchline.openai_api.endpoint_table import ENDPOINTS, INPUT_TOKENS, REQUEST_SCHEMAS, RESPONSES
from batchline.server.admission import Admission, WorkRate
from batchline.server.api_keys import OPEN_PATHS, ApiKeys
from batchline.server.boundary import RequestBoundary
from batchline.server.errors import error_response, unrouted
from batchline.server.incoming_body import Bodies
from batchline.server.inference import Inference
from batchline.server.metrics import Metrics
from batchline.server.openapi import ERROR_RESPONSES, DocsPage, describe, request_body
from batchline.server.options import CorsOptions, ServerOptions
from batchline.server.request_path import PlainPath
from batchline.server.responses_api import ResponsesApi
from batchline.server.service import Service


def create_app(backend: Backend, options: ServerOptions) -> FastAPI:
    """The web application over a backend, which the caller starts and closes."""
    app = FastAPI(
        title="Batchline",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if options.docs else None,
    )
    metrics = Metrics(backend.stats)
    inference = Inference(backend, metrics, options.max_request_bytes)
    rate = WorkRate()
    responses = ResponsesApi(backend, inference, rate, max_running=options.max_in_flight)
    _add_inference(app, inference, responses)
    _add_kept_responses(app, responses)
    _add_service(app, Service(backend, metrics))
    if options.docs:
        _add_docs(app)
    served = _served_paths(app)

    async def answer_unrouted(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)  # the only type it is registered for
        return error_response(unrouted(request, exc, served, _allowed_methods(app, request)))

    app.add_exception_handler(HTTPException, answer_unrouted)
    app.openapi = _cached_description(app, options)  # type: ignore[method-assign]
    app.add_middleware(
        Admission,
        metrics=metrics,
        max_in_flight=options.max_in_flight,
        paths=frozenset(REQUEST_SCHEMAS),
        rate=rate,
        num_keys=len(options.api_keys),
    )
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys, open_paths=_open_paths(options))
    bodies = Bodies(options.body_limits)
    metrics.body_bytes.set_function(lambda: bodies.num_bytes)
    app.add_middleware(RequestBoundary, metrics=metrics, bodies=bodies, paths=served, logs_access=options.access_log)
    if options.cors.allow_origins:
        _add_cors(app, options.cors)
    app.add_middleware(PlainPath, prefix=f"/{options.root_path.strip('/')}".rstrip("/"))
    return app


def _add_inference(app: FastAPI, inference: Inference, responses: ResponsesApi) -> None:
    own_routes = {RESPONSES: responses.create, INPUT_TOKENS: responses.input_tokens}
    for path in REQUEST_SCHEMAS:
        endpoint = ENDPOINTS[path]
        method = endpoint.method
        app.add_api_route(
            path,
            own_routes.get(path, inference.answer if method == "POST" else inference.look_up),
            methods=[method],
            name=path.strip("/").replace("/", "_"),
            summary=endpoint.summary,
            tags=["inference"],
            response_model=None,
            responses=ERROR_RESPONSES,
            openapi_extra=request_body(path) if method == "POST" else None,
        )


def _add_kept_responses(app: FastAPI, responses: ResponsesApi) -> None:
    def add(path: str, route: Any, method: str) -> None:
        app.add_api_route(
            RESPONSES + path,
            route,
            methods=[method],
            tags=["responses"],
            response_model=None,
            responses=ERROR_RESPONSES,
        )

    add("/{response_id}", responses.retrieve, "GET")
    add("/{response_id}", responses.delete, "DELETE")
    add("/{response_id}/input_items", responses.input_items, "GET")
    add("/{response_id}/cancel", responses.cancel, "POST")


def _add_service(app: FastAPI, service: Service) -> None:
    def add(path: str, route: Any, method: str = "GET") -> None:
        app.add_api_route(
            path, route, methods=[method], tags=["service"], response_model=None, responses=ERROR_RESPONSES
        )
        if method == "GET":  # the HTTP server leaves out the body of an answer to HEAD
            app.add_api_route(path, route, methods=["HEAD"], include_in_schema=False, response_model=None)

    add("/v1/models", service.models)
    add("/v1/models/{model_id:path}", service.model)
    add("/version", service.version)
    add("/load", service.load)
    add("/ping", service.health, "POST")
    add("/health", service.health)
    add("/ping", service.health)
    add("/metrics", service.metrics)


def _add_docs(app: FastAPI) -> None:
    page = DocsPage()
    app.add_api_route("/docs", page.show, methods=["GET"], include_in_schema=False, response_model=None)
    app.add_api_route("/", page.lead_there, methods=["GET"], include_in_schema=False, response_model=None)


def _served_paths(app: FastAPI) -> frozenset[str]:
    return frozenset(route.path_format for route in app.routes if isinstance(route, APIRoute))


def _allowed_methods(app: FastAPI, request: Request) -> list[str]:
    """The methods of all routes that match the request's path."""
    matching = [route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0].value]
    return sorted({method for route in matching for method in route.methods or ()})


def _open_paths(options: ServerOptions) -> frozenset[str]:
    """Paths that need no key."""
    return OPEN_PATHS if options.metrics_need_key else OPEN_PATHS | {"/metrics"}


def _cached_description(app: FastAPI, options: ServerOptions) -> Any:
    def description() -> dict[str, Any]:
        if not app.openapi_schema:
            app.openapi_schema = describe(app, needs_key=bool(options.api_keys), open_paths=_open_paths(options))
        return app.openapi_schema

    return description


def _add_cors(app: FastAPI, cors: CorsOptions) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=cors.allow_origins,
        allow_methods=cors.allow_methods,
        allow_headers=cors.allow_headers,
        allow_credentials=cors.allow_credentials,
        allow_private_network=True,
        expose_headers=["X-Request-Id", "Retry-After"],
    )
