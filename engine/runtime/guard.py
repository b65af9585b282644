"""The one place that catches `Exception` inside EngineCore and the workers.

An exception that leaves a hook there kills the process and every request with it. So a hook that
vLLM calls belongs to a feature and is guarded: its first failure is logged with its traceback, the
feature is switched off for the life of this process, and every hook of it answers with its
fallback from then on. A method that the service calls uses `attempt`: its failure is a value.

What cannot be caught (a signal, exhausted shared memory) has to be prevented instead.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureState:
    """`num_failures` exceptions were caught; `reason` is the first of them, None while on."""

    on: bool
    num_failures: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """What `attempt` caught, in one line."""

    message: str


class Feature:
    """Something this process can do without. One object per name; it never comes back on.

    A guarded hook may fail half-way: what its fallback relies on must be untouched until its end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = FeatureState(on=True, num_failures=0, reason=None)

    def guarded(self, fallback: Callable[P, T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Call `fallback` with the same arguments where the hook cannot answer."""

        def decorate(hook: Callable[P, T]) -> Callable[P, T]:
            @functools.wraps(hook)
            def call(*args: P.args, **kwargs: P.kwargs) -> T:
                if self.state.on:
                    try:
                        return hook(*args, **kwargs)
                    except Exception as error:
                        self.disable(error)
                return fallback(*args, **kwargs)

            return call

        return decorate

    def guarded_with_default(self, default: T) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Answer with `default`, which is shared between calls, where the hook cannot."""

        def decorate(hook: Callable[P, T]) -> Callable[P, T]:
            def fallback(*args: P.args, **kwargs: P.kwargs) -> T:
                return default

            return self.guarded(fallback)(hook)

        return decorate

    def disable(self, error: Exception) -> None:
        """Switch the feature off. Only the first failure is logged."""
        previous, reason = self.state, describe(error)
        self.state = FeatureState(
            on=False, num_failures=previous.num_failures + 1, reason=previous.reason or reason
        )
        if previous.on:
            logger.error("%s is off in this process: %s", self.name, reason, exc_info=error)


_features: dict[str, Feature] = {}


def feature(name: str) -> Feature:
    """The process's one feature of that name."""
    return _features.setdefault(name, Feature(name))


def features() -> dict[str, FeatureState]:
    return {name: known.state for name, known in _features.items()}


def attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failure:
    """The call's result, or its exception as a value; always logged, never switched off."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        logger.exception("%s failed", getattr(call, "__qualname__", call))
        return Failure(describe(error))


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
