"""Generator of docs/migrate/refused.md: fields and routes of other servers that are refused.

.venv/bin/python scripts/compat_fields.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from service.compat import unsupported  # noqa: E402

FILE = ROOT / "docs" / "migrate" / "refused.md"
FIELDS = """# Refused fields and routes

This page lists the fields and routes of vLLM, SGLang and OpenAI that the server refuses. Read it
before you switch, or if a request was refused. [Migrate](index.md) explains the treatment of all
other fields. `scripts/compat_fields.py` writes this page.

## Fields

A neutral value is one that has no effect. The server accepts it. `null` is neutral for every field.
The server refuses any other value with the text of the last column. Some of these fields are served
on other routes: `echo` on `/v1/completions`, `top_logprobs` on `/v1/chat/completions`, and
`prompt_logprobs` on `/v1/completions` and `/inference/v1/generate`.

| field | neutral values | text of the error |
|---|---|---|
"""
ROUTES = """
## Routes

These routes answer with the error code `unsupported`.

| route | API | text of the error |
|---|---|---|
"""


def fields() -> str:
    return "".join(
        f"| `{name}` | {', '.join(f'`{json.dumps(v)}`' for v in param.allowed_values)} "
        f"| {param.suggestion} |\n"
        for name, param in sorted(unsupported.UNSUPPORTED.items())
    )


def routes() -> str:
    tables = {
        "OpenAI": unsupported.OPENAI_ROUTES,
        "vLLM": unsupported.VLLM_ROUTES,
        "SGLang": unsupported.SGLANG_ROUTES,
        "SkyRL": {"/skyrl/v1/{path}": unsupported.SKYRL},
    }
    return "".join(
        f"| `{path}` | {api} | {suggestion} |\n"
        for api, table in tables.items()
        for path, suggestion in table.items()
    )


def rendered() -> str:
    return FIELDS + fields() + ROUTES + routes()


if __name__ == "__main__":
    FILE.write_text(rendered(), encoding="utf-8")
