"""Routing of requests to data-parallel engines, by shared KV and load (service's process).

vLLM sends a request without a rank to the engine with the fewest requests. So the samples of a
group would run on all engines, and each would prefill the prompt. Requests that share KV go to the
same engine here, and others to the engine with the fewest tokens in running requests.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.types.samples import SampleRequest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

MAX_KEYS: Final = 2**16
"""Number of groups, sessions and prompts whose engine is known; the least recent is forgotten."""


@dataclass(frozen=True, slots=True)
class PlacementKeys:
    """Keys of the KV that samples submitted together share with others.

    `own` are remembered with the engine. `prefixes` are looked up after them, but not remembered.
    """

    own: tuple[Hashable, ...] = ()
    prefixes: tuple[Hashable, ...] = ()


class Placement:
    """Engines of the most recent groups, sessions and prompts of chains.

    `running_tokens` counts, per engine, the tokens that its unfinished requests may have.
    """

    def __init__(self, num_engines: int, running_tokens: Callable[[], list[int]]) -> None:
        self._num_engines = num_engines
        self._running_tokens = running_tokens
        self._ranks: OrderedDict[Hashable, int] = OrderedDict()

    def rank(self, samples: Sequence[SampleRequest] = (), block_size: int = 1) -> int | None:
        """Data-parallel rank for samples submitted together; None if there is one engine only."""
        if self._num_engines == 1:
            return None
        if samples and samples[0].data_parallel_rank is not None:
            return samples[0].data_parallel_rank
        keys = placement_keys(samples, block_size)
        known = (self._ranks.get(key) for key in (*keys.own, *keys.prefixes))
        rank = next((found for found in known if found is not None), None)
        if rank is None:
            tokens = self._running_tokens()
            rank = tokens.index(min(tokens))
        for key in keys.own:
            self._remember(key, rank)
        return rank

    def _remember(self, key: Hashable, rank: int) -> None:
        self._ranks[key] = rank
        self._ranks.move_to_end(key)
        if len(self._ranks) > MAX_KEYS:
            self._ranks.popitem(last=False)


def placement_keys(samples: Sequence[SampleRequest], block_size: int) -> PlacementKeys:
    """Keys of the first sample that has some; prefills submitted with a group have none."""
    every = (_keys(sample, block_size) for sample in samples)
    return next((keys for keys in every if keys.own), PlacementKeys())


def _keys(sample: SampleRequest, block_size: int) -> PlacementKeys:
    """Key of a session, or else of a group and, in a chain, of the prompt and its prefixes.

    A chain may contain all groups of many rollouts. One of its prompts finds KV if an earlier
    prompt is its beginning, as in a conversation. A common system prompt alone is no reason to run
    all groups on one engine, so that only whole prompts are remembered.
    """
    if sample.session_id is not None:
        return PlacementKeys((sample.session_id,))
    group = () if sample.group is None else (sample.group,)
    if sample.kept_kv is None:
        return PlacementKeys(group)
    chain = sample.kept_kv.chain
    hashes = _prefix_hashes(sample.prompt_token_ids, block_size)
    prefixes = tuple((chain, prefix) for prefix in hashes)
    return PlacementKeys((*group, *prefixes[:1]), prefixes[1:])


def _prefix_hashes(tokens: Sequence[int], block_size: int) -> list[int]:
    """Hashes of the prefixes that fill blocks, from the longest to the shortest one."""
    hashes: list[int] = []
    for end in range(block_size, len(tokens) + 1, block_size):
        previous = hashes[-1] if hashes else 0
        hashes.append(hash((previous, tuple(tokens[end - block_size : end]))))
    return hashes[::-1]


class RequestsInFlight(dict[str, bytes]):
    """Engines of vLLM's unfinished requests, by internal request id, with the tokens per engine.

    A request counts its prompt and the maximum of its response. A sum over all requests for each
    new group would take milliseconds with tens of thousands of them.
    """

    def __init__(self, states: Mapping[str, "RequestState"]) -> None:
        super().__init__()
        self._states = states
        self._added: dict[str, int] = {}
        self.tokens: Counter[bytes] = Counter()

    def __setitem__(self, request_id: str, engine: bytes) -> None:
        self._subtract(request_id)
        super().__setitem__(request_id, engine)
        if (state := self._states.get(request_id)) is not None:
            tokens = self._added[request_id] = state.prompt_len + (state.max_tokens_param or 0)
            self.tokens[engine] += tokens

    def pop(self, request_id: str, *default: Any) -> Any:
        self._subtract(request_id)
        return super().pop(request_id, *default)

    def _subtract(self, request_id: str) -> None:
        if (tokens := self._added.pop(request_id, None)) is not None:
            self.tokens[self[request_id]] -= tokens


def count_running_tokens(llm: "AsyncLLM") -> None:
    """Replace vLLM's record of unfinished requests, while it is empty, by one with sums."""
    client: Any = llm.engine_core
    assert not client.reqs_in_flight, "requests were added before the record was replaced"
    client.reqs_in_flight = RequestsInFlight(llm.output_processor.request_states)


def running_tokens(llm: "AsyncLLM") -> list[int]:
    """Prompt and maximum response tokens of the unfinished requests, per data-parallel engine."""
    client: Any = llm.engine_core
    requests: RequestsInFlight = client.reqs_in_flight
    return [requests.tokens[engine] for engine in client.core_engines]
