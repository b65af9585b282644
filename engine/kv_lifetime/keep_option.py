"""Request option to keep KV across weights updates, in SamplingParams.extra_args."""

from typing import Any, Final, TypedDict

KEEP_KV_ARG: Final = "coppice_keep_kv"
"""Key of the option in a request's `extra_args`."""
KV_VERSIONS: Final = "coppice_kv_versions"
"""Key in the `kv_transfer_params` of an output: the request's `OlderKv`."""

OlderKv = list[tuple[str, int]]
"""Weights versions and ends of consecutive ranges of positions, the first one from position 0.

The KV of later positions is computed under the version that the engine serves.
"""


class KeepOption(TypedDict):
    """Value of the option, with the limit of `engine.types.samples.KeptKv`."""

    max_lag: int | None


def keep_option(request: Any) -> KeepOption | None:
    """The option of a request in EngineCore; None if it does not keep its KV."""
    params = request.sampling_params
    option: KeepOption | None = (params.extra_args or {}).get(KEEP_KV_ARG) if params else None
    return option
