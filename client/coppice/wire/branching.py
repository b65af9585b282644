"""Wire types of rollout trees: branch points, branching factors and limits."""

from typing import Annotated, Literal

from pydantic import Field

from coppice.wire.base import JsonInteger, RequestModel

MAX_LEAVES = 1024
MAX_DEPTH = 32
MAX_TREE_TOKENS = 2**24
Position = Annotated[int, Field(ge=0, le=1_048_576), JsonInteger()]
Factor = Annotated[int, Field(ge=1, le=64), JsonInteger()]
Lease = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class Entropy(RequestModel):
    """Estimation of the entropy at a token position, by which branch points are chosen.

    The source is the top k logprobs, or the logprob of the sampled token.
    """

    source: Literal["topk", "sampled_token"] = "topk"
    k: Annotated[int, Field(ge=2, le=20), JsonInteger()] = 20
    top_n: Annotated[int, Field(ge=1, le=16), JsonInteger()] = 2


class Branching(RequestModel):
    """Options of a rollout tree: samples of one prompt that share prefixes.

    Lengths are numbers of response tokens. Branch points are rounded up so that the path, prompt
    included, is one token longer than a multiple of the KV block size. `factor` may be a list by
    depth; its last entry applies to all greater depths.
    """

    mode: Literal["interval", "entropy", "positions", "external"]
    interval: Annotated[int, Field(ge=1, le=1_048_576), JsonInteger()] = 128
    positions: Annotated[list[Position], Field(max_length=MAX_DEPTH)] = []
    factor: Factor | Annotated[list[Factor], Field(min_length=1, max_length=MAX_DEPTH)] = 2
    max_depth: Annotated[int, Field(ge=1, le=MAX_LEAVES), JsonInteger()] = 4
    max_leaves: Annotated[int, Field(ge=1, le=MAX_LEAVES), JsonInteger()] = 16
    max_new_tokens_total: Annotated[int, Field(ge=1, le=MAX_TREE_TOKENS), JsonInteger()] = 8192
    min_gap: Position = 32
    entropy: Entropy | None = None
    first_split: Position = 0
    on_early_stop: Literal["redistribute", "none"] = "redistribute"
    flatten: bool = False
    lease_seconds: Lease = 60.0


class BranchRequest(RequestModel):
    """Body of POST /v1/rollouts/{id}/branch, which samples n segments after a given segment.

    Without `segment` they start at the prompt. They are cut after `max_tokens`, rounded up to the
    next position at which a cut costs no extra prefill; without it, they end as samples do.
    """

    segment: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    group: Annotated[int, Field(ge=0, lt=4096), JsonInteger()] = 0
    n: Annotated[int, Field(ge=1, le=MAX_LEAVES), JsonInteger()] = 1
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576), JsonInteger()] | None = None
