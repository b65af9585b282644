"""The limits of requests: the one list of them, and the generator of its table.

Each stays where it is enforced. `tests/docs/test_limits.py` compares the list with the code.
"""

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coppice.wire.problem_catalogue import PROBLEMS
from scripts.reference.settings import shown_default
from service.config.settings import settings_fields

ROOT = Path(__file__).parents[2]
WIRE = ROOT / "client" / "coppice" / "wire"
HTTP = "service/http"
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of requests, or of what they take together.

    `name` is a setting, or a constant as `path/of/module.py:NAME`. `excess` are the codes of the
    problems, or what happens instead. `module` enforces it, and `test` exceeds it.
    """

    what: str
    name: str
    excess: str
    module: str
    test: str

    @property
    def constant(self) -> tuple[Path, str] | None:
        """Module and name of a constant; None for a setting."""
        path, found, name = self.name.partition(":")
        return (ROOT / path, name) if found else None


LIMITS = (
    # Connections and heads
    Limit(
        "bytes of a request's URL and headers, or of chunk extensions and trailers",
        f"{HTTP}/limited_protocol.py:MAX_HEADER_BYTES",
        "headers_too_large",
        f"{HTTP}/limited_protocol.py",
        "tests/service/test_http_limits.py::test_head_of_many_parts_is_refused_before_its_end",
    ),
    Limit(
        "bytes of a URL",
        f"{HTTP}/limited_protocol.py:MAX_URL_BYTES",
        "headers_too_large",
        f"{HTTP}/limited_protocol.py",
        "tests/service/test_http_limits.py::test_url_past_the_parser_s_limit_is_too_large",
    ),
    Limit(
        "pipelined requests of a connection",
        f"{HTTP}/limited_protocol.py:MAX_PIPELINED_REQUESTS",
        "the connection is closed",
        f"{HTTP}/limited_protocol.py",
        "tests/service/test_framing.py::test_unbounded_pipelined_requests_are_not_queued",
    ),
    Limit(
        "connections per port, and at most half of the process's open files",
        "limits.max_connections",
        "an idle connection is closed; if none is idle, overloaded, except for probes",
        f"{HTTP}/open_file_limit.py",
        "tests/service/test_connections.py::"
        "test_past_the_limit_probes_are_answered_and_others_refused",
    ),
    Limit(
        "seconds that a connection is idle",
        "limits.keep_alive_seconds",
        "the connection is closed",
        f"{HTTP}/serve.py",
        "tests/service/test_limits.py::test_idle_connection_is_closed",
    ),
    Limit(
        "seconds to receive headers, or 16 KiB of a body",
        "limits.read_seconds",
        "request_timeout, and the connection is closed",
        "service/routes/middleware.py",
        "tests/service/test_http_limits.py::test_slowly_sent_body_times_out",
    ),
    Limit(
        "seconds for the client to read 256 KiB of a response",
        "limits.write_seconds",
        "the connection is closed, and the work cancelled",
        f"{HTTP}/limited_protocol.py",
        "tests/service/test_http_limits.py::test_unread_plain_answer_is_dropped",
    ),
    # Bodies
    Limit(
        "bytes of JSON",
        "limits.max_json_bytes",
        "body_too_large",
        f"{HTTP}/bodies.py",
        "tests/service/test_bodies.py::"
        "test_json_above_the_limit_is_refused_and_the_packed_form_named",
    ),
    Limit(
        "bytes of a packed request, and of an offered rollout or session; twice as many of a key, "
        "and four times as many in all, may arrive or wait to be parsed",
        "limits.max_body_bytes",
        "body_too_large; quota_exceeded; overloaded",
        f"{HTTP}/bodies.py",
        "tests/service/test_bodies.py::"
        "test_key_with_too_many_bytes_of_bodies_is_refused_and_others_are_not",
    ),
    Limit(
        "values in JSON, or in the header of a packed request, counted by commas and opening "
        "brackets, also those in texts",
        f"{HTTP}/bodies.py:MAX_JSON_VALUES",
        "body_too_large",
        f"{HTTP}/bodies.py",
        "tests/service/test_bodies.py::test_json_with_too_many_values_is_refused_before_it_is_parsed",
    ),
    Limit(
        "bytes of the body of a control route",
        f"{HTTP}/bodies.py:INLINE_BYTES",
        "body_too_large",
        f"{HTTP}/bodies.py",
        "tests/service/test_limits.py::test_body_of_a_control_route_is_limited",
    ),
    Limit(
        "bytes of the body of a tokenizer's route",
        "service/compat/serving/routes.py:MAX_TOKENIZER_BYTES",
        "body_too_large",
        "service/compat/serving/routes.py",
        "tests/service/test_limits.py::test_body_of_a_tokenizer_route_is_limited",
    ),
    Limit(
        "bytes of an uploaded file",
        "weights.max_upload_bytes",
        "body_too_large",
        "service/routes/dependencies.py",
        "tests/service/test_weights.py::test_upload_over_the_limit_is_cut_off",
    ),
    Limit(
        "errors of a body that are listed",
        f"{HTTP}/bodies.py:MAX_FIELD_ERRORS",
        "invalid_request without a list",
        f"{HTTP}/bodies.py",
        "tests/service/test_bodies.py::"
        "test_errors_are_counted_and_the_first_ones_listed_up_to_a_limit",
    ),
    # Prompts
    Limit(
        "tokens of a prompt and its response",
        "engine.max_context_tokens",
        "prompt_too_long",
        "service/rollouts/tokenizer.py",
        "tests/service/test_tokenizer.py::test_text_that_cannot_fit_is_refused_before_tokenization",
    ),
    Limit(
        "characters of a key that wait for tokenization",
        "service/rollouts/tokenizer.py:KEY_CHARS",
        "quota_exceeded",
        "service/rollouts/tokenizer.py",
        "tests/engine/test_fair_limiter.py::test_work_is_bounded_per_key_and_in_total",
    ),
    Limit(
        "characters in all that wait for tokenization",
        "service/rollouts/tokenizer.py:TOTAL_CHARS",
        "overloaded",
        "service/rollouts/tokenizer.py",
        "tests/engine/test_fair_limiter.py::test_work_is_bounded_per_key_and_in_total",
    ),
    Limit(
        "characters of the arguments of a tool call in a chat",
        "engine/requests/chat_conversion.py:MAX_ARGUMENTS_CHARACTERS",
        "invalid_request",
        "engine/requests/chat_conversion.py",
        "tests/engine/test_chat.py::test_long_arguments_are_refused_before_they_are_parsed",
    ),
    Limit(
        "bytes of structured outputs of a key that wait for their check",
        "engine/requests/grammar_check.py:CLIENT_BYTES",
        "quota_exceeded",
        "engine/requests/grammar_check.py",
        "tests/engine/test_grammar_turns.py::test_waiting_checks_of_a_key_are_bounded",
    ),
    Limit(
        "bytes of structured outputs in all that wait for their check",
        "engine/requests/grammar_check.py:TOTAL_BYTES",
        "overloaded",
        "engine/requests/grammar_check.py",
        "tests/engine/test_grammar_turns.py::test_waiting_checks_of_a_key_are_bounded",
    ),
    Limit(
        "pixels of all images of one request",
        "service/rollouts/tokenizer.py:MAX_PIXELS",
        "invalid_request",
        "service/rollouts/tokenizer.py",
        "tests/engine/test_image_refusals.py::test_pixels_of_a_request_are_limited_together",
    ),
    # Samples
    Limit(
        "samples of one request, or responses of one score",
        "service/rollouts/validation.py:MAX_SAMPLES",
        "invalid_request",
        "service/rollouts/validation.py",
        "tests/compat/test_sglang.py::test_samples_of_a_request_are_limited",
    ),
    Limit(
        "running samples of a key",
        "limits.max_samples_per_key",
        "quota_exceeded; invalid_request for one request above it",
        "service/rollouts/admission.py",
        "tests/service/test_admission.py::"
        "test_key_over_its_sample_limit_gets_429_and_others_are_served",
    ),
    Limit(
        "running prompt tokens of a key",
        "limits.max_prompt_tokens_per_key",
        "quota_exceeded; invalid_request for one request above it",
        "service/rollouts/admission.py",
        "tests/service/test_admission.py::test_prompt_tokens_count_once_per_group",
    ),
    Limit(
        "running samples of all keys",
        "limits.max_samples_running",
        "overloaded; invalid_request for one request above it",
        "service/rollouts/admission.py",
        "tests/service/test_admission.py::test_full_server_answers_503",
    ),
    Limit(
        "bytes of the supports of all running requests",
        "limits.max_support_bytes",
        "overloaded; invalid_request for one request above it",
        "service/rollouts/admission.py",
        "tests/service/test_admission.py::test_supports_of_all_keys_together_are_limited",
    ),
    Limit(
        "logprobs of the top k or of given token ids at one token",
        "engine.max_logprobs",
        "invalid_request",
        "service/rollouts/groups/logprob_tables.py",
        "tests/service/test_top_logprobs.py::test_rollouts_with_too_many_logprobs_are_refused",
    ),
    Limit(
        "logprobs of the top k or of given token ids in the answer of one request",
        "service/rollouts/groups/logprob_tables.py:MAX_REQUEST_LOGPROBS",
        "invalid_request",
        "service/rollouts/groups/logprob_tables.py",
        "tests/service/test_top_logprobs.py::test_rollouts_with_too_many_logprobs_are_refused",
    ),
    Limit(
        "logprobs of the top k or of given token ids that one score computes",
        "service/rollouts/groups/logprob_tables.py:MAX_COMPUTED_LOGPROBS",
        "invalid_request",
        "service/rollouts/scoring.py",
        "tests/service/test_top_logprobs.py::test_logprobs_at_prompts_of_all_responses_are_limited",
    ),
    Limit(
        "prompt logprobs that one answer of another server's API repeats",
        "service/compat/serving/call.py:MAX_PROMPT_LOGPROBS",
        "invalid_request",
        "service/compat/serving/call.py",
        "tests/compat/test_top_logprobs.py::"
        "test_prompt_logprobs_repeated_in_too_many_choices_are_refused",
    ),
    Limit(
        "seconds of a lease of a tree, a pause or a sleep",
        "limits.max_lease_seconds",
        "the lease is shortened",
        "service/weights/pauses.py",
        "tests/service/test_pauses.py::test_long_lease_is_shortened_to_the_maximum",
    ),
    # Results
    Limit(
        "seconds of a GET that waits for a result",
        f"{HTTP}/params.py:MAX_WAIT_SECONDS",
        "invalid_request",
        f"{HTTP}/params.py",
        "tests/service/test_limits.py::test_wait_for_a_result_is_limited",
    ),
    Limit(
        "seconds for which a result is kept",
        "limits.keep_answers_seconds",
        "the result is dropped",
        "service/rollouts/manager.py",
        "tests/service/test_async_rollouts.py::test_result_cache_is_bounded_in_time_and_bytes",
    ),
    Limit(
        "bytes of the results that are kept",
        "limits.keep_answers_bytes",
        "the oldest are dropped; invalid_request for supports above 3/4 of it",
        "service/rollouts/manager.py",
        "tests/service/test_async_rollouts.py::test_result_cache_is_bounded_in_time_and_bytes",
    ),
    Limit(
        "bytes of the stored responses of a key (`/v1/responses`)",
        "service/compat/response_store.py:MAX_OWNER_BYTES",
        "the oldest are dropped",
        "service/compat/response_store.py",
        "tests/compat/test_openai_responses.py::test_store_is_bounded_per_key_in_total_and_in_time",
    ),
    Limit(
        "bytes of the stored responses of all keys",
        "service/compat/response_store.py:MAX_BYTES",
        "the oldest are dropped",
        "service/compat/response_store.py",
        "tests/compat/test_openai_responses.py::test_store_is_bounded_per_key_in_total_and_in_time",
    ),
    # Sessions
    Limit(
        "open sessions of all keys",
        "sessions.max_open",
        "overloaded",
        "service/sessions/manager.py",
        "tests/service/sessions/test_limits.py::test_open_sessions_are_limited",
    ),
    Limit(
        "open sessions of a key",
        "sessions.max_open_per_key",
        "quota_exceeded",
        "service/sessions/manager.py",
        "tests/service/sessions/test_limits.py::test_open_sessions_are_limited",
    ),
    Limit(
        "samples of a session that run, and prompts of it that are prepared",
        "sessions.max_running_calls",
        "quota_exceeded",
        "service/sessions/factory.py",
        "tests/service/sessions/test_limits.py::"
        "test_prompts_that_are_prepared_at_the_same_time_are_limited",
    ),
    Limit(
        "tokens of a session's trees",
        "sessions.max_tokens",
        "session_exhausted",
        "service/sessions/session.py",
        "tests/service/sessions/test_limits.py::test_turns_and_tokens_are_limited",
    ),
    Limit(
        "bytes of the trees of all sessions",
        "sessions.max_bytes",
        "the oldest ended sessions are dropped, then overloaded",
        "service/sessions/store.py",
        "tests/service/sessions/test_limits.py::"
        "test_memory_is_limited_and_ended_sessions_are_dropped_first",
    ),
    # Prompt KV
    Limit(
        "open downloads of prompt KV; a key may have half of them",
        "kv.max_open_transfers",
        "quota_exceeded; overloaded",
        "service/kv/build.py",
        "tests/service/prompt_kv/test_slow_readers.py::test_downloads_past_the_limit_are_refused",
    ),
    Limit(
        "seconds of a lease of prompt KV",
        "kv.max_lease_seconds",
        "the lease is shortened",
        "service/kv/handles/handle.py",
        "tests/service/prompt_kv/test_exports.py::test_lease_is_capped_by_the_settings",
    ),
    Limit(
        "longest leases of prompt KV, with all renewals",
        "service/kv/handles/handle.py:MAX_LEASES",
        "the lease is shortened",
        "service/kv/handles/handle.py",
        "tests/service/prompt_kv/test_handles.py::test_renewals_end_at_the_maximum_lifetime",
    ),
    # Adapters
    Limit(
        "loaded adapters",
        "engine.max_adapters",
        "adapters_full",
        "service/adapters/manager.py",
        "tests/service/test_adapters.py::test_adapter_slot_is_freed_once_no_sample_uses_it",
    ),
    Limit(
        "rank of an adapter",
        "engine.max_adapter_rank",
        "weights_refused",
        "engine/weights/validation.py",
        "tests/engine/adapters/test_validation.py::test_adapter_config_must_be_supported",
    ),
    Limit(
        "bytes of an adapter's `adapter_config.json`",
        "service/adapters/adapter_files.py:MAX_CONFIG_BYTES",
        "weights_refused",
        "service/adapters/adapter_files.py",
        "tests/service/test_adapters.py::test_file_longer_than_its_size_is_copied_up_to_the_limit",
    ),
)


def lines() -> Iterator[str]:
    yield "| limit of | name | value | what exceeds it | enforced in | test |"
    yield "|---|---|---|---|---|---|"
    for limit in LIMITS:
        name, value = _name_and_value(limit)
        answer, places = _excess(limit.excess), f"`{limit.module}` | `{limit.test}`"
        yield f"| {limit.what} | {name} | {value} | {answer} | {places} |"


def field_lines() -> Iterator[str]:
    yield "| name | value | declared in |"
    yield "|---|---|---|"
    for path in sorted(WIRE.rglob("*.py")):
        for name, value in constants(path).items():
            if name.startswith("MAX_"):
                yield f"| `{name}` | {value:,} | `{path.relative_to(ROOT)}` |"


def constants(path: Path) -> dict[str, int | float]:
    """Numeric constants of a module, which is not imported."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        if isinstance(target, ast.Name) and target.id.isupper():
            value = _number(node.value)  # type: ignore[attr-defined]
            if value is not None:
                found[target.id] = value
    return found


def _number(node: ast.expr | None) -> int | float | None:
    """Value of an expression of numbers; None for any other."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) in (int, float) else None  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _number(node.left), _number(node.right)
        if left is not None and right is not None:
            return OPERATORS[type(node.op)](left, right)  # type: ignore[no-any-return]
    return None


def _name_and_value(limit: Limit) -> tuple[str, str]:
    if limit.constant is None:
        section, name = limit.name.split(".")
        field = next(f for s, n, f in settings_fields() if (s, n) == (section, name))
        return f"[`{limit.name}`](settings.md#{limit.name})", shown_default(name, field)
    path, name = limit.constant
    return f"`{name}`", f"{constants(path)[name]:,}"


def codes(excess: str) -> list[str]:
    """Codes of problems that a text names."""
    return [word for word in excess.replace(";", " ").replace(",", " ").split() if word in PROBLEMS]


def _excess(excess: str) -> str:
    for code in codes(excess):
        excess = excess.replace(code, f"{PROBLEMS[code].status} [`{code}`](errors.md#{code})")
    return excess
