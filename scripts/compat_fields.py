"""Generator of docs/migrate/refused.md: request fields of other servers, and refused routes.

.venv/bin/python scripts/compat_fields.py
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from service.compat import unsupported_routes  # noqa: E402
from service.compat.anthropic.bodies import MessagesBody  # noqa: E402
from service.compat.openai.chat import ChatBody  # noqa: E402
from service.compat.openai.completions import CompletionBody  # noqa: E402
from service.compat.responses.bodies import ResponsesBody  # noqa: E402
from service.compat.sglang.generate import SglangBody, SglangSampling  # noqa: E402
from service.compat.unsupported_fields import (  # noqa: E402
    NEUTRAL,
    REFUSED,
    RESPONSES_REFUSED,
    UNKNOWN,
    Refused,
)
from service.compat.vllm.tokens import GenerateBody, GenerateSampling  # noqa: E402

FILE = ROOT / "docs" / "migrate" / "refused.md"
SERVED: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/inference/v1/generate": (GenerateBody, GenerateSampling),
    "/generate": (SglangBody, SglangSampling),
    "/v1/messages": (MessagesBody,),
    "/v1/responses": (ResponsesBody,),
}
FIELDS = """# Request fields and refused routes

This page lists the request fields of vLLM, SGLang, OpenAI and Anthropic, and the routes that the
server refuses. Read it before you switch, or if a request was refused. `scripts/compat_fields.py`
writes this page.

## Fields

The routes that sample are allow-lists. A field is served, neutral or refused:

- A served field has its effect on the named routes. `all` stands for `/v1/completions`,
  `/v1/chat/completions`, `/v1/responses`, `/v1/messages`, `/inference/v1/generate` and
  `/generate`. The last two take sampling parameters in `sampling_params`.
  `/v1/messages/count_tokens` serves the fields of `/v1/messages` that the prompt depends on.
- A neutral field has no effect on the samples and their answer. Its value is ignored.
- A refused field is accepted with `null` and with its neutral values, which have no effect. Any
  other value is refused with the text of the last column.

A field that is not in the table is refused. Unknown fields in messages and tools are ignored and
counted.

| field | served on | elsewhere | neutral values | reason or text of the error |
|---|---|---|---|---|
"""
ROUTES = """
## Routes

These routes answer with the error code `unsupported`.

| route | API | text of the error |
|---|---|---|
"""


def fields() -> str:
    served = {
        path: {name for body in bodies for name in body.model_fields}
        for path, bodies in SERVED.items()
    }
    names = {name for found in served.values() for name in found} | REFUSED.keys() | NEUTRAL.keys()
    return "".join(
        _row(name, [path for path, found in served.items() if name in found])
        for name in sorted(names)
    )


def _row(name: str, paths: list[str]) -> str:
    everywhere = len(paths) == len(SERVED)
    where = "all" if everywhere else ", ".join(f"`{path}`" for path in paths)
    return f"| `{name}` | {where} | {' | '.join(_elsewhere(name, everywhere=everywhere))} |\n"


def _elsewhere(name: str, *, everywhere: bool) -> Iterator[str]:
    """Treatment, neutral values, and reason or error of a field where it is not served."""
    if everywhere:
        yield from ("", "", "")
    elif name in NEUTRAL:
        yield from ("neutral", "", NEUTRAL[name])
    elif name in REFUSED:
        yield from _refused(REFUSED[name])
    else:
        yield from ("refused", "", UNKNOWN)


def _refused(field: Refused) -> Iterator[str]:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.allowed_values)
    yield from ("refused", values, field.suggestion)


def of_responses() -> str:
    """Rows of the fields that only /v1/responses refuses."""
    return "".join(
        f"| `{name}` of `/v1/responses` |  | {' | '.join(_refused(field))} |\n"
        for name, field in RESPONSES_REFUSED.items()
    )


def routes() -> str:
    tables = {
        "OpenAI": unsupported_routes.OPENAI_ROUTES,
        "vLLM": unsupported_routes.VLLM_ROUTES,
        "SGLang": unsupported_routes.SGLANG_ROUTES,
        "SkyRL": {"/skyrl/v1/{path}": unsupported_routes.SKYRL},
    }
    return "".join(
        f"| `{path}` | {api} | {suggestion} |\n"
        for api, table in tables.items()
        for path, suggestion in table.items()
    )


def rendered() -> str:
    return FIELDS + fields() + of_responses() + ROUTES + routes()


if __name__ == "__main__":
    FILE.write_text(rendered(), encoding="utf-8")
