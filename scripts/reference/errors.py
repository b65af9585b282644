"""Generator of the table of errors from the catalogue of problems."""

from collections.abc import Iterator

from coppice.wire.problem_catalogue import PROBLEMS


def lines() -> Iterator[str]:
    yield "| code | status | retry | meaning | what to do |"
    yield "|---|---|---|---|---|"
    for kind in PROBLEMS.values():
        retry = "yes" if kind.retryable else "no"
        code = f'<a id="{kind.code}"></a>`{kind.code}`'
        text = f"**{kind.title}.** {kind.meaning}"
        yield f"| {code} | {kind.status} | {retry} | {text} | {kind.action} |"
