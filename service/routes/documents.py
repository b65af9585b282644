"""The contract itself, served as it was written."""

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response

from service.access import public

router = APIRouter()


@router.get("/openapi.yaml")
@public
async def contract() -> Response:
    return Response(_contract(), media_type="application/yaml")


@cache
def _contract() -> bytes:
    return (Path(__file__).parents[1] / "openapi.yaml").read_bytes()
