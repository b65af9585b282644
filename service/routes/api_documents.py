"""Routes that serve documents: openapi.yaml, and the catalogue of problems (API errors)."""

import html
from collections.abc import Collection
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from coppice.wire.problem_catalogue import CATALOGUE_PATH, PROBLEMS, ProblemCatalogue, ProblemKind
from service.auth.access import page, public
from service.http.errors import NotFound
from service.http.params import accepts_html
from service.http.responses import JSON, declare_responses, json_response

router = APIRouter()
problems = APIRouter(prefix=CATALOGUE_PATH)
YAML = "application/yaml"
HTML = "text/html"
CATALOGUE = ProblemCatalogue(problems=list(PROBLEMS.values()))
PROBLEM_TYPES = (*JSON, HTML)


@router.get("/openapi.yaml", responses=declare_responses({200: [YAML]}))
@public
async def contract() -> Response:
    return Response(_contract(), media_type=YAML)


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
