"""Prometheus metrics of agent sessions: open, ended and dropped sessions, turns and tokens."""

from typing import get_args

from coppice.wire.sessions import AttachReason, SessionEndReason, Turn
from service.observability.metric_declaration import MetricTable, counter, gauge


class SessionMetrics(MetricTable):
    """Metrics of agent sessions, their calls and the tokens of their turns."""

    open = gauge("sessions_open", "Open agent sessions")
    bytes = gauge("sessions_bytes", "Memory of the trees of open and cached agent sessions")
    ended = counter("sessions_ended", "Ended agent sessions", reason=get_args(SessionEndReason))
    dropped = counter(
        "sessions_dropped", "Ended agent sessions that were dropped because of sessions.max_bytes"
    )
    turns = counter(
        "session_turns",
        "Turns of agent sessions, by the reason for the place of their prompt in the tree",
        reason=get_args(AttachReason),
    )
    tokens = counter(
        "session_tokens",
        "Tokens of the turns of agent sessions: all prompt tokens, those of them that were found "
        "in the prefix cache or are new in the tree, and sampled tokens",
        kind=("prompt", "cached", "context", "sampled"),
    )
    replaced_fields = counter(
        "session_replaced_fields",
        "Sampling parameters of agents that were replaced by those of the session",
    )

    def record_turn(self, turn: Turn, num_sampled_tokens: int) -> None:
        self.turns.labels(turn.reason).inc()
        self.tokens.labels("prompt").inc(turn.num_prompt_tokens)
        self.tokens.labels("cached").inc(turn.num_cached_tokens)
        self.tokens.labels("context").inc(turn.num_new_context_tokens)
        self.tokens.labels("sampled").inc(num_sampled_tokens)
