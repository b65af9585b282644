"""Generator of docs/reference/errors.md: the catalogue of problems as a table.

.venv/bin/python scripts/problems.py
"""

from pathlib import Path

from coppice.wire.problem_catalogue import PROBLEMS, ProblemKind

FILE = Path(__file__).parents[1] / "docs" / "reference" / "errors.md"
HEAD = """# Errors

Every failed request is answered with a problem document (RFC 9457, `application/problem+json`).
Its `code` is stable. Its `type` is the path of the code's entry in the catalogue below, which the
server serves without a key: `GET /problems` lists all entries, and `GET /problems/<code>` returns
one, as JSON or, for browsers, as HTML. `detail` says what happened to this request, and `errors`
lists invalid fields. With `retry_after_seconds` and `Retry-After` the server suggests when to
repeat a request.

The client raises one exception per group of codes ([client](../client/README.md)) and repeats
retryable requests itself. Routes of other servers' APIs add OpenAI's member `error`, and those of
OpenAI answer 400 instead of 422.

This table is written by `scripts/problems.py`.

| code | status | title | retry | meaning | what to do |
|---|---|---|---|---|---|
"""


def row(kind: ProblemKind) -> str:
    retry = "yes" if kind.retryable else "no"
    cells = (f"`{kind.code}`", str(kind.status), kind.title, retry, kind.meaning, kind.action)
    return f"| {' | '.join(cells)} |\n"


def rendered() -> str:
    return HEAD + "".join(map(row, PROBLEMS.values()))


if __name__ == "__main__":
    FILE.write_text(rendered(), encoding="utf-8")
