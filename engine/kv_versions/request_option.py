"""Request options: to keep the KV of a chain, to cache none of it, to bound a prefill per step."""

from typing import Any, Final, TypedDict

KEEP_KV_ARG: Final = "coppice_keep_kv"
"""Key of the option in a request's `extra_args`."""
KV_VERSIONS: Final = "coppice_kv_versions"
"""Key in the `kv_transfer_params` of an output: the request's older KV, a `KvReport`."""

UNCACHED_ARG: Final = "coppice_uncached"
"""Key in `extra_args` of a request whose blocks are not added to the prefix cache."""

PREFILL_BOUND_ARG: Final = "coppice_prefill_tokens_per_step"
"""Key in `extra_args` of the maximum number of a request's tokens that a step computes."""

OlderKv = list[tuple[str, int]]
"""Weights versions and ends of consecutive ranges of positions, the first one from position 0.

The KV of later positions is computed under the version that the engine serves.
"""


class KvReport(TypedDict):
    """Older KV of a request, and the number of updates since the oldest of it was computed."""

    versions: OlderKv
    lag: int


class KeepOption(TypedDict):
    """Value of the option, with the owner and the limits of `engine.types.KeptKv`."""

    owner: str
    max_lag: int | None
    max_kl: float | None


def keep_option(request: Any) -> KeepOption | None:
    """The option of a request in EngineCore; None if it does not keep its KV."""
    params = request.sampling_params
    option: KeepOption | None = (params.extra_args or {}).get(KEEP_KV_ARG) if params else None
    return option


def is_uncached(request: Any) -> bool:
    """True if the blocks of a request in EngineCore are not added to the prefix cache."""
    params = request.sampling_params
    return params is not None and UNCACHED_ARG in (params.extra_args or {})


def prefill_bound(request: Any) -> int | None:
    """Maximum number of tokens of a request in EngineCore that a step computes; None: vLLM's."""
    params = request.sampling_params
    bound: int | None = (params.extra_args or {}).get(PREFILL_BOUND_ARG) if params else None
    return bound
