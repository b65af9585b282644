"""Settings section `sessions`: limits per agent session, per API key and in total."""

from pydantic import Field

from engine.settings.base import Bytes, PositiveInt, Section


class SessionsSettings(Section):
    """Limits of agent sessions. Ended sessions are kept for limits.keep_answers_seconds."""

    max_open: PositiveInt = Field(
        16_384,
        description="maximum number of open sessions; further ones are refused with 503 and "
        "Retry-After; increase it for large batches of agents",
    )
    max_open_per_key: PositiveInt | None = Field(
        None,
        description="maximum number of open sessions per API key; none: no limit; set it if "
        "several callers share the server",
    )
    max_running_calls: PositiveInt = Field(
        32,
        description="maximum number of samples of one session that run at the same time; as many "
        "prompts may be prepared (rendered and tokenized) at the same time; increase it for agents "
        "with many parallel sub-agents",
    )
    max_tokens: PositiveInt = Field(
        4_194_304,
        description="maximum number of tokens of one session's trees, context included; a "
        "request's max_tokens_total can only be lower; increase it for very long episodes",
    )
    max_bytes: Bytes = Field(
        2**32,
        description="maximum memory of the trees of all sessions, in bytes; the oldest ended "
        "sessions are dropped first, then calls are refused with 503; increase it if sessions are "
        "dropped before they are fetched",
    )
