"""Context variables with the ids of request, rollout, group and API key, for log records."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
rollout_id: ContextVar[str | None] = ContextVar("rollout_id", default=None)
group_id: ContextVar[str | None] = ContextVar("group_id", default=None)
key_name: ContextVar[str | None] = ContextVar("key_name", default=None)

_IDS = (request_id, rollout_id, group_id, key_name)


@contextmanager
def log_context(**ids: str) -> Iterator[None]:
    """Context manager that adds ids, such as `rollout_id`, to the log records of a block."""
    variables = {variable.name: variable for variable in _IDS}
    tokens = [(variables[name], variables[name].set(value)) for name, value in ids.items()]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


def current_ids() -> dict[str, str]:
    values = {variable.name: variable.get() for variable in _IDS}
    return {name: value for name, value in values.items() if value is not None}
