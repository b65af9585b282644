"""Dashboard panels of agent sessions."""

from helm.panel import Panel, level, rate, share, total_rate

_TURNS = "coppice_session_turns_total"

SESSIONS = [
    Panel(
        "Open sessions",
        "none",
        "Open agent sessions; sessions.max_open limits them.",
        {"{{instance}}": level("coppice_sessions_open")},
    ),
    Panel(
        "Memory of sessions",
        "bytes",
        "Trees of open and ended sessions. At sessions.max_bytes ended sessions are dropped, and "
        "then calls are refused.",
        {"{{instance}}": level("coppice_sessions_bytes")},
    ),
    Panel(
        "Ended sessions",
        "suffix: sessions/s",
        "Sessions per second that ended, by reason, and of them those dropped to free memory.",
        {
            "{{reason}}": rate("coppice_sessions_ended_total", "reason"),
            "dropped": total_rate("coppice_sessions_dropped_total"),
        },
    ),
    Panel(
        "Expired sessions",
        "percentunit",
        "Share of the ended sessions that expired, because the agent made no call for too long.",
        {
            "{{job}}": share(
                "coppice_sessions_ended_total", "coppice_sessions_ended_total", 'reason="expired"'
            )
        },
    ),
    Panel(
        "Turns of sessions",
        "suffix: turns/s",
        "Answered calls per second, by the place of their prompt in the tree. Turns with "
        "edited_history or template branch and are prefilled again.",
        {"{{reason}}": rate(_TURNS, "reason")},
    ),
    Panel(
        "Tokens of sessions",
        "suffix: tok/s",
        "Tokens per second of agents' calls: whole prompts, those found in the prefix cache, new "
        "context, and sampled tokens.",
        {"{{kind}}": rate("coppice_session_tokens_total", "kind")},
    ),
    Panel(
        "Replaced parameters",
        "suffix: /turn",
        "Sampling parameters per turn that agents sent and the session replaced.",
        {"{{job}}": share("coppice_session_replaced_fields_total", _TURNS)},
    ),
]
