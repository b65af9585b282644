"""Patches for sampling controls: resumed responses, seeds, grammars, logits processors.

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
from collections.abc import Callable, Mapping
from typing import Any

from engine.sampling.grammar_budget import (
    OVERRUN,
    BudgetedGrammar,
    budget_of,
    in_grammar_thread,
)

PRIOR_TOKENS_ARG = "coppice_num_prior_tokens"
DRAWN_TOKENS_ARG = "coppice_num_drawn_tokens"
RANDOM_SEEDS = 2**31
"""Upper bound of the number that vLLM's sampler for CPUs draws per token of a seeded sample."""


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


def create_grammar(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrapper of vLLM's `_create_grammar`: limits the grammar and advances it by earlier tokens."""

    @functools.wraps(create)
    def created(manager: Any, request: Any) -> Any:
        budget = budget_of(request.structured_output_request.structured_output_key)
        grammar = BudgetedGrammar(create(manager, request), budget)
        advance_grammar(manager, grammar, request)
        return grammar

    return created


def advance_grammar(manager: Any, grammar: BudgetedGrammar, request: Any) -> None:
    """Advance a grammar by the earlier tokens of the response, without those of its reasoning."""
    number = num_prior_tokens(request.sampling_params)
    if not number:
        return
    tokens = list(request.output_token_ids[:number])
    start, _ = manager._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
    if start > number:
        return
    request.structured_output_request.reasoning_ended = True
    if not grammar.advance(request.request_id, tokens[start:]):
        raise ValueError("the earlier tokens of the response violate its structured_outputs")


def naming_overruns(accept: Callable[..., bool]) -> Callable[..., bool]:
    """Wrapper of vLLM's `accept_tokens`, which is called for each request in each step.

    It sets the stop reason of a request that ends because its grammar has taken too long.
    """

    @functools.wraps(accept)
    def accept_tokens(self: Any, request: Any, new_token_ids: Any) -> bool:
        if accept(self, request, new_token_ids):
            return True
        if request.structured_output_request.grammar.is_used_up:
            request.stop_reason = OVERRUN
        return False

    return accept_tokens


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
    manager = StructuredOutputManager
    manager._create_grammar = create_grammar(manager._create_grammar)
    manager.grammar_bitmask = in_grammar_thread(manager.grammar_bitmask)
    manager.validate_tokens = in_grammar_thread(manager.validate_tokens)
    manager.accept_tokens = naming_overruns(manager.accept_tokens)
    initialize = CachedRequestState.__post_init__

    def initialize_split(self: Any) -> None:
        split_prior_tokens(self)
        skip_drawn_tokens(self)
        initialize(self)

    CachedRequestState.__post_init__ = initialize_split
    gpu_model_runner.build_logitsprocs = build_all_logits_processors(
        gpu_model_runner.build_logitsprocs
    )
