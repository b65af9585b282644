"""Request body of SGLang's POST /generate, and its fields that are refused or ignored.

The body is an allow-list: a field that would change the samples or the answer is refused, and so is
an unknown one.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from coppice.wire.base import MAX_TOKENS, TokenIds
from coppice.wire.rollouts import MAX_GROUPS, MAX_SAMPLES_PER_GROUP, Prompt, WeightsConstraint
from coppice.wire.sampling import Sampling
from service.auth.keys import ApiKey
from service.compat.bodies import CompatModel, Flag, Name
from service.compat.serving.call import SEED_MASK, namespaced_salt
from service.errors import InvalidRequest
from service.http.bodies import fault
from service.rollouts.request import NewGroup, NewRollout

Text = Annotated[str, Field(min_length=1, max_length=16 * 2**20)]
# Pydantic tries every member of a union; without fail_fast each collects an error per element.
Texts = Annotated[list[Text], Field(max_length=MAX_GROUPS, fail_fast=True)]
ListsOfTokenIds = Annotated[list[TokenIds], Field(max_length=MAX_GROUPS, fail_fast=True)]
NumSamples = Annotated[
    int,
    Field(ge=1, le=MAX_SAMPLES_PER_GROUP),
    BeforeValidator(lambda value: 1 if value is None else value),
]
NATIVE_NAMES = (
    *("temperature", "top_p", "min_p", "stop_token_ids", "skip_special_tokens", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields with the name and the meaning of the native parameter; null is the default."""
ANY_JSON = "$$ANY$$"
"""Value of `json_schema` for any JSON object."""

_MEDIA = "images and other media are not supported on this route: use /v1/chat/completions"
_PROCESSOR = "not supported: code of callers is not run; use logit_bias"
_OTHERS = "not supported on this route: use logprobs of /v1/completions, or POST /v1/score"
_NOT_RETURNED = "the response has no such field: leave the parameter out"
_EMBEDS = "not supported: send input_ids"
_THINKING = "reasoning has no limit of its own: set max_new_tokens for the whole response"
REFUSED = {
    "image_data": _MEDIA,
    "audio_data": _MEDIA,
    "video_data": _MEDIA,
    "modalities": _MEDIA,
    "input_embeds": _EMBEDS,
    "positional_embed_overrides": _EMBEDS,
    "custom_logit_processor": _PROCESSOR,
    "custom_params": _PROCESSOR,
    "logprob_start_len": "not supported: use POST /v1/score",
    "multi_item_delimiter_indices": "not supported: use POST /v1/score",
    "top_logprobs_num": _OTHERS,
    "token_ids_logprob": _OTHERS,
    "return_sampling_mask": "not supported: use return_support",
    "return_flat_raw_top_logprobs": _NOT_RETURNED,
    "return_entropy": _NOT_RETURNED,
    "return_prompt_token_ids": _NOT_RETURNED,
    "return_indexer_topk": _NOT_RETURNED,
    "return_hidden_states": "not supported: use /v1/rollouts, which can export the prompt KV",
    "return_routed_experts": "not supported on this route: use /v1/rollouts",
    "session_params": "not supported: send the whole prompt; its prefix is cached",
    "require_reasoning": "reasoning is not separated on this route: leave the field out",
    "max_thinking_tokens": _THINKING,
    "stop_regex": "not supported: use stop strings or stop_token_ids",
}
WITHOUT_EFFECT: dict[str, object] = {
    "logprob_start_len": -1,
    "modalities": "text",
    "max_thinking_tokens": None,
}
"""Values of refused fields that have no effect, if they are others than false, 0 and empty ones."""
NEUTRAL = frozenset(
    (
        *("background", "bootstrap_host", "bootstrap_pair_key", "bootstrap_port"),
        *("bootstrap_room", "cache_salt", "conversation_id", "custom_labels"),
        *("data_parallel_rank", "decode_tp_size", "disagg_prefill_dp_rank", "encoder_urls"),
        *("external_trace_header", "http_worker_ipc", "image_max_dynamic_patch"),
        *("images_config", "kv_router_hint", "log_metrics", "lora_id", "max_dynamic_patch"),
        *("min_dynamic_patch", "mm_content_hashes", "mm_hashes", "need_wait_for_mm_inputs"),
        *("no_logs", "num_items_assigned", "received_time", "return_bytes"),
        *("return_flat_raw_top_logprobs_b64", "return_text_in_logprobs", "routed_dp_rank"),
        *("routed_experts_start_len", "routing_key", "session_id"),
        *("spaces_between_special_tokens", "stream_interval", "use_audio_in_video"),
        *("video_config", "video_max_dynamic_patch"),
    )
)
"""Fields that have no effect on the samples and their answer."""


class StrictModel(CompatModel):
    """Model whose further fields are refused, unless they or their values have no effect."""

    model_config = ConfigDict(extra="allow")

    def check_extra(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in NEUTRAL:
                continue
            if name not in REFUSED:
                raise InvalidRequest.of_parameter(name, "not supported: leave the field out")
            if _has_effect(name, value):
                raise InvalidRequest.of_parameter(name, REFUSED[name])


def _has_effect(name: str, value: object) -> bool:
    """True if a value of a refused field, or one of its values per prompt, has an effect."""
    if isinstance(value, list):
        return any(_has_effect(name, each) for each in value)
    if name in WITHOUT_EFFECT:
        return value not in (None, WITHOUT_EFFECT[name])
    return bool(value)


class SglangSampling(StrictModel):
    """SGLang's sampling parameters; as in SGLang, max_new_tokens is 128 by default.

    At most one of `json_schema`, `regex`, `ebnf` and `structural_tag` may be set.
    """

    n: NumSamples = 1
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = 128
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    stop_token_ids: TokenIds | None = None
    no_stop_trim: Flag = False
    skip_special_tokens: bool | None = None
    ignore_eos: Flag = False
    sampling_seed: int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def sampling(self) -> Sampling:
        """Native sampling parameters; `top_k` -1 and 0 both disable top-k."""
        stop = [self.stop] if isinstance(self.stop, str) and self.stop else self.stop or None
        given = {
            **{name: getattr(self, name) for name in NATIVE_NAMES},
            "max_tokens": self.max_new_tokens,
            "min_tokens": self.min_new_tokens,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "stop": stop,
            "ignore_eos": self.ignore_eos or None,
            "include_stop_str_in_output": self.no_stop_trim or None,
            "structured_outputs": self._constraint(),
        }
        found = {name: value for name, value in given.items() if value is not None}
        try:
            return Sampling.model_validate(found)
        except ValidationError as error:
            raise fault(error) from error

    def _constraint(self) -> dict[str, Any] | None:
        """Native `structured_outputs`; SGLang's clients send empty strings for none."""
        schema = self.json_schema
        kinds: dict[str, tuple[str, Any]] = {
            "json_schema": ("json_object", True) if schema == ANY_JSON else ("json", schema),
            "regex": ("regex", self.regex),
            "ebnf": ("grammar", self.ebnf),
            "structural_tag": ("structural_tag", self.structural_tag),
        }
        found = {name: kind for name, kind in kinds.items() if kind[1] or kind[1] == {}}
        if len(found) > 1:
            first, second, *_ = found
            raise InvalidRequest.of_parameter(second, f"cannot be combined with {first}")
        return dict(found.values()) or None


class SglangBody(StrictModel):
    """Request body of SGLang's POST /generate.

    It has one prompt or a list of them, as text or as token ids. `lora_path` is the name of an
    adapter.
    """

    text: Text | Texts | None = None
    input_ids: TokenIds | ListsOfTokenIds | None = None
    sampling_params: SglangSampling = SglangSampling()
    rid: Name | None = None
    return_logprob: Flag = False
    stream: Flag = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    extra_key: Name | None = None
    lora_path: Name | None = None
    weights: WeightsConstraint | None = None
    return_support: Flag = False

    @property
    def is_single(self) -> bool:
        """True if the response is one object and not a list: one prompt with one sample."""
        given = self.input_ids if self.text is None else self.text
        nested = isinstance(given, list) and not (given and isinstance(given[0], int))
        return not nested and self.sampling_params.n == 1

    def prompts(self) -> list[Prompt]:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest.of_parameter("input_ids", "send either input_ids or text")
        if self.text is not None:
            texts = [self.text] if isinstance(self.text, str) else self.text
            if not texts:
                raise InvalidRequest.of_parameter("text", "must not be empty")
            return [Prompt(text=text) for text in texts]
        given: Any = self.input_ids
        rows = given if given and isinstance(given[0], list) else [given]
        if not all(rows):
            raise InvalidRequest.of_parameter("input_ids", "must not contain an empty prompt")
        return [Prompt(token_ids=row) for row in rows]

    def rollout(self, prompts: list[list[int]], caller: ApiKey) -> NewRollout:
        """Request for n samples of each tokenized prompt."""
        params = self.sampling_params
        seed = None if params.sampling_seed is None else params.sampling_seed & SEED_MASK
        return NewRollout(
            owner=caller.name,
            groups=[NewGroup(prompt=prompt, n=params.n, seed=seed) for prompt in prompts],
            sampling=params.sampling(),
            weights=self.weights,
            priority=self.priority or 0,
            adapter=self.lora_path,
            return_support=self.return_support,
            stream_tokens=self.stream,
            cache_salt=namespaced_salt(caller, self.extra_key),
        )
