"""Routes that serve openapi.yaml, its interactive page and the list of error types.

The page is Swagger UI 5.35.0, whose files are part of the package (`service/api_docs`): it works
without access to the internet. Page and contract are public; requests sent from the page need the
same API keys as any other.
"""

import asyncio
import html
from collections.abc import Collection
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from coppice.wire.problem_catalogue import CATALOGUE_PATH, PROBLEMS, ProblemCatalogue, ProblemKind
from service.auth.access import page, public
from service.errors import NotFound
from service.http.params import accepts_html
from service.http.responses import JSON, LargeResponse, declare_responses, json_response

router = APIRouter()
problems = APIRouter(prefix=CATALOGUE_PATH)
YAML = "application/yaml"
HTML = "text/html"
CATALOGUE = ProblemCatalogue(problems=list(PROBLEMS.values()))
LINKS = {
    "/docs": "HTTP API, to read and to try",
    "/ui": "Live page",
    "/v1/status": "Status",
    "/metrics": "Metrics, in Prometheus's format",
    CATALOGUE_PATH: "Errors",
}
PROBLEM_TYPES = (*JSON, HTML)
API_DOCS = {
    "page.js": "text/javascript",
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
}
API_DOCS_HEADERS = {
    # Swagger UI has inline styles, and its icons are data URLs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "max-age=3600",
}


@router.get("/", responses=declare_responses({200: [HTML]}))
@page
async def index(request: Request) -> Response:
    """Links to what this port serves. Public, so the page names no model and no version."""
    served = {getattr(route, "path", None) for route in request.app.routes}
    links = "".join(
        f"<li><a href={path}>{text}</a>" for path, text in LINKS.items() if path in served
    )
    head = "<!doctype html><html lang=en><meta charset=utf-8><title>Coppice</title>"
    return Response(f"{head}<h1>Coppice</h1><ul>{links}</ul></html>", media_type=HTML)


@router.get("/openapi.yaml", responses=declare_responses({200: [YAML]}))
@public
async def contract() -> Response:
    return Response(_contract(), media_type=YAML)


@router.get("/docs", responses=declare_responses({200: [HTML]}))
@page
async def api_docs() -> Response:
    return await _api_docs_response("page.html", HTML)


@router.get("/docs/{name}", responses=declare_responses({200: API_DOCS.values()}, NotFound))
@public
async def api_docs_file(name: str) -> Response:
    if name not in API_DOCS:
        raise NotFound("the page /docs has no such file")
    return await _api_docs_response(name, API_DOCS[name])


@problems.get("", responses=declare_responses({200: PROBLEM_TYPES}))
@page
async def list_problems(request: Request) -> Response:
    if accepts_html(request.headers.get("accept")):
        return _page(PROBLEMS.values())
    return json_response(CATALOGUE)


@problems.get("/{code}", responses=declare_responses({200: PROBLEM_TYPES}, NotFound))
@page
async def get_problem(code: str, request: Request) -> Response:
    """Describe one problem (API error); `type` in problem documents refers to this route."""
    kind = PROBLEMS.get(code)
    if kind is None:
        raise NotFound(f"no problem has this code: GET {CATALOGUE_PATH} lists all codes")
    if accepts_html(request.headers.get("accept")):
        return _page([kind])
    return json_response(kind)


@cache
def _contract() -> bytes:
    return (Path(__file__).parents[1] / "openapi.yaml").read_bytes()


async def _api_docs_response(name: str, media_type: str) -> Response:
    """Response with a file of the page, sent in parts: a slow reader buffers only one of them."""
    content = await asyncio.to_thread(_api_docs_file, name)
    return LargeResponse(content, media_type=media_type, headers=API_DOCS_HEADERS)


@cache
def _api_docs_file(name: str) -> bytes:
    return (Path(__file__).parents[1] / "api_docs" / name).read_bytes()


def _page(kinds: Collection[ProblemKind]) -> Response:
    title = "Problems" if len(kinds) > 1 else next(iter(kinds)).title
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
    return Response(head + "".join(map(_section, kinds)) + "</html>", media_type=HTML)


def _section(kind: ProblemKind) -> str:
    rows = {
        "Code": kind.code,
        "Status": str(kind.status),
        "Meaning": kind.meaning,
        "Retry": "The same request may succeed later." if kind.retryable else "No.",
        "What to do": kind.action,
    }
    terms = "".join(f"<dt>{name}<dd>{html.escape(text)}" for name, text in rows.items())
    return f"<h2><a href={kind.type}>{html.escape(kind.title)}</a></h2><dl>{terms}</dl>"
