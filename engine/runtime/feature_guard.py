"""Exception guards around hooks in EngineCore and workers: a failing feature is disabled.

This is the only module that catches `Exception` there. An exception that leaves a hook there kills
the process and every request. So each hook that vLLM calls belongs to a feature and is guarded. Its
first failure is logged with a traceback and disables the feature for the life of this process; all
its hooks return their fallbacks from then on. A method that the service calls uses `attempt`, which
returns the failure as a value.

Failures that cannot be caught, such as signals or exhausted shared memory, must be prevented.
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
    """State of an optional feature: on, or disabled after errors.

    `reason` is the first of `num_failures` exceptions.
    """

    on: bool
    num_failures: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Message of an exception that `attempt` has caught."""

    message: str


class Feature:
    """Optional feature of this process that is switched off for good when one of its hooks fails.

    There is one object per name.

    A guarded hook may fail half-way, so it must not change state that its fallback relies on before
    it has succeeded.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = FeatureState(on=True, num_failures=0, reason=None)

    def guarded(self, fallback: Callable[P, T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorator of a hook: calls `fallback` instead if the hook fails or the feature is off."""

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
        """Decorator of a hook: returns `default` if the hook fails or the feature is off.

        Calls share the `default` object.
        """

        def decorate(hook: Callable[P, T]) -> Callable[P, T]:
            def fallback(*args: P.args, **kwargs: P.kwargs) -> T:
                return default

            return self.guarded(fallback)(hook)

        return decorate

    def disable(self, error: Exception) -> None:
        """Switch the feature off because of an error. Only the first error is logged."""
        previous, reason = self.state, describe(error)
        self.state = FeatureState(
            on=False, num_failures=previous.num_failures + 1, reason=previous.reason or reason
        )
        if previous.on:
            logger.error("%s is off in this process: %s", self.name, reason, exc_info=error)


_features: dict[str, Feature] = {}


def feature(name: str) -> Feature:
    """The Feature with this name in this process, created by the first call."""
    return _features.setdefault(name, Feature(name))


def features() -> dict[str, FeatureState]:
    return {name: known.state for name, known in _features.items()}


def attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failure:
    """Call a function; returns its result, or a Failure if it raises.

    Failures are logged; nothing is disabled.
    """
    try:
        return call(*args, **kwargs)
    except Exception as error:
        logger.exception("%s failed", getattr(call, "__qualname__", call))
        return Failure(describe(error))


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
