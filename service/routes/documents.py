"""Routes of the API's documents: openapi.yaml."""

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response

from service.auth.access import public
from service.http.responses import declare_responses

router = APIRouter()

MEDIA_TYPE = "application/yaml"


@router.get("/openapi.yaml", responses=declare_responses({200: [MEDIA_TYPE]}))
@public
async def contract() -> Response:
    return Response(_contract(), media_type=MEDIA_TYPE)


@cache
def _contract() -> bytes:
    return (Path(__file__).parents[1] / "openapi.yaml").read_bytes()
