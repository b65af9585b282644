"""Hooks of EngineCore and the workers for sampling controls that vLLM applies only in part.

Earlier tokens of a response: a sample that is resumed, or that continues a segment of a tree, has
the first tokens of its response at the end of its prompt. Penalties, bad words and grammars depend
on the tokens of the response. Here these tokens become the first output tokens of the request, as
those of a request that vLLM resumes after a preemption.

Random streams: a seeded sample that continues on another replica has a new generator there. Here it
skips the numbers of the tokens that are sampled already. On a GPU the number of draws per token is
not known, so it gets another seed there: its numbers differ, and none is repeated. vLLM's second
model runner derives each number from the seed and the position and needs no hook.

Speculation: with it vLLM's runner for CPUs does not load the processors of `min_p` and
`logit_bias`. Here they are loaded. Requests that use them get no drafts.
"""

import copy
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PRIOR_TOKENS_ARG = "coppice_num_prior_tokens"
DRAWN_TOKENS_ARG = "coppice_num_drawn_tokens"
RANDOM_SEEDS = 2**31
"""Upper bound of the number that vLLM's sampler for CPUs draws per token of a seeded sample."""
GRAMMAR_CPU_SECONDS = 1.0
GRAMMAR_CPU_SECONDS_PER_TOKEN = 0.005
"""Time that a grammar may take on average after the first second is used up."""


def num_prior_tokens(sampling_params: Any) -> int:
    """Number of tokens at the end of a request's prompt that belong to its response."""
    extra_args: Mapping[str, Any] = getattr(sampling_params, "extra_args", None) or {}
    return int(extra_args.get(PRIOR_TOKENS_ARG, 0))


def move_prior_tokens(request: Any) -> Any:
    """Move the earlier tokens of the response from the prompt of a new request to its output.

    `num_prompt_tokens` still counts them: the scheduler uses it as the length of the prefill.
    """
    number = num_prior_tokens(request.sampling_params)
    if not number:
        return request
    assert 0 < number < len(request.prompt_token_ids), "a prompt has at least one token"
    request._output_token_ids.extend(request.prompt_token_ids[-number:])
    request.prompt_token_ids = request.prompt_token_ids[:-number]
    params = request.sampling_params = copy.copy(request.sampling_params)
    params.max_tokens += number
    params.min_tokens += number if params.min_tokens else 0
    request.max_tokens = params.max_tokens
    return request


def with_prior_tokens(data: Any, request: Any) -> Any:
    """Add the earlier tokens of the response to the prompt that a worker receives.

    vLLM's second model runner receives them in `prefill_token_ids` already.
    """
    number = num_prior_tokens(request.sampling_params)
    if number and data.prefill_token_ids is None:
        data.prompt_token_ids = [*request.prompt_token_ids, *request.output_token_ids[:number]]
    return data


def split_prior_tokens(state: Any) -> None:
    """Split the tokens of a new request in a worker into its prompt and its first output tokens."""
    number = num_prior_tokens(state.sampling_params)
    if number and not state.output_token_ids:
        state.output_token_ids = list(state.prompt_token_ids[-number:])
        state.prompt_token_ids = state.prompt_token_ids[:-number]


def skip_drawn_tokens(state: Any) -> None:
    """Advance a CPU generator by one draw per token that the sample's stream has produced already.

    vllm/v1/sample/ops/topk_topp_sampler.py, `TopKTopPSampler.forward_cpu`; `use_fp64_gumbel`, which
    draws more, is never set. Seeded samples get no drafts. Any other generator gets another seed.
    """
    generator, params = state.generator, state.sampling_params
    number = int((getattr(params, "extra_args", None) or {}).get(DRAWN_TOKENS_ARG, 0))
    if not number or generator is None:
        return
    if generator.device.type != "cpu":
        generator.manual_seed(_other_seed(params.seed, number))
        return
    import torch

    torch.randint(0, RANDOM_SEEDS, (number,), generator=generator, dtype=torch.long)


def _other_seed(seed: int, num_drawn: int) -> int:
    digest = hashlib.blake2b(f"{seed}:+{num_drawn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def advance_grammar(grammar: Any, request: Any) -> Any:
    """Advance a compiled grammar by the earlier tokens of the response."""
    number = num_prior_tokens(request.sampling_params)
    tokens = list(request.output_token_ids[:number])
    if number and not grammar.accept_tokens(request.request_id, tokens):
        raise ValueError("the earlier tokens of the response violate its structured_outputs")
    return BudgetedGrammar(grammar)


class BudgetedGrammar:
    """Grammar of one request with a limit of its CPU time in EngineCore's steps.

    The time per token may grow with an ambiguous grammar's text, and all requests wait for it. A
    request past the limit ends as one whose token its grammar rejects: with an error.
    """

    def __init__(self, grammar: Any, clock: Callable[[], float] = time.thread_time) -> None:
        self._grammar = grammar
        self._clock = clock
        self._left = GRAMMAR_CPU_SECONDS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        with self._timed():
            accepted = bool(self._grammar.accept_tokens(request_id, tokens))
        self._left = min(
            self._left + GRAMMAR_CPU_SECONDS_PER_TOKEN * len(tokens), GRAMMAR_CPU_SECONDS
        )
        return accepted and self._left > 0

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        with self._timed():
            self._grammar.fill_bitmask(bitmask, index)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        with self._timed():
            return list(self._grammar.validate_tokens(tokens))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_at = self._clock()
        yield
        self._left -= self._clock() - began_at


def build_all_logits_processors(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrapper of vLLM's `build_logitsprocs` that loads all processors with speculation, too."""
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

    @functools.wraps(build)
    def built(vllm_config: Any, device: Any, is_pin_memory: bool, *args: Any, **kw: Any) -> Any:
        if not vllm_config.speculative_config:
            return build(vllm_config, device, is_pin_memory, *args, **kw)
        build(vllm_config, device, is_pin_memory, *args, **kw)  # refuses custom processors
        made = (cls(vllm_config, device, is_pin_memory) for cls in BUILTIN_LOGITS_PROCESSORS)
        return LogitsProcessors(itertools.chain(made))

    return built


def _after(method: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """Method whose result passes through `change`, with the request as the second argument."""

    @functools.wraps(method)
    def call(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return change(method(self, request, *args, **kwargs), request)

    return call


@functools.cache
def install() -> None:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    new_request = Request.from_engine_core_request.__func__
    Request.from_engine_core_request = classmethod(
        _after(new_request, lambda request, _: move_prior_tokens(request))
    )
    NewRequestData.from_request = classmethod(
        _after(NewRequestData.from_request.__func__, with_prior_tokens)
    )
    StructuredOutputManager._create_grammar = _after(
        StructuredOutputManager._create_grammar, advance_grammar
    )
    initialize = CachedRequestState.__post_init__

    def initialize_split(self: Any) -> None:
        split_prior_tokens(self)
        skip_drawn_tokens(self)
        initialize(self)

    CachedRequestState.__post_init__ = initialize_split
    gpu_model_runner.build_logitsprocs = build_all_logits_processors(
        gpu_model_runner.build_logitsprocs
    )
