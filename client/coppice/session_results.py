"""Result types of agent sessions: newly created sessions, and the token trees of an ended one."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coppice.rollout_results import Group, Tree, group_of, sample_of, segment_of
from coppice.wire.rollouts import GroupAnswer
from coppice.wire.sessions import (
    SessionAnswer,
    SessionEndReason,
    SessionState,
    SessionUsage,
    Turn,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """A new session, with what its agent needs: a base URL and a key.

    Pass `openai_url` and `key` to OpenAI's client, or `base_url` and `key` to Anthropic's.
    """

    id: str
    base_url: str
    key: str = field(repr=False)

    @property
    def openai_url(self) -> str:
        """Base URL for OpenAI's clients, which contains the version of the API."""
        return f"{self.base_url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionGroup:
    """The sessions of one `create` call; `id` is the argument of `stream`."""

    id: str
    sessions: tuple[AgentSession, ...]


# NumPy's == is elementwise, so groups and results compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionResult:
    """Tokens of a session: one group with a tree per conversation that shares no prefix.

    `sequence` is the session's position in a stream; None while it is open. `rewards` are by the
    ids of leaves.
    """

    id: str
    group: str
    state: SessionState
    end_reason: SessionEndReason | None
    sequence: int | None
    metadata: Mapping[str, str]
    reward: float | None
    rewards: Mapping[str, float] | None
    groups: tuple[Group, ...]
    turns: tuple[Turn, ...]
    usage: SessionUsage


def hidden_ends(session: SessionResult, tree: Tree) -> frozenset[str]:
    """Ids of leaves with hidden tokens of a sample, of which a prompt continues the others."""
    num_hidden = {turn.segment: turn.num_hidden_tokens for turn in session.turns}
    ends = tree.continuations().intersection(tree.leaves)
    num_children = Counter(segment.parent for segment in tree.segments)
    return frozenset(
        each.id
        for each in tree.segments
        if each.id in ends
        and len(each.token_ids) <= num_hidden.get(each.id, 0)
        and num_children[each.parent] > 1
    )


def session_result_of(answer: SessionAnswer) -> SessionResult:
    return SessionResult(
        id=answer.id,
        group=answer.group,
        state=answer.state,
        end_reason=answer.end_reason,
        sequence=answer.sequence,
        metadata=answer.metadata,
        reward=answer.reward,
        rewards=answer.rewards,
        groups=tuple(map(_group_of, answer.groups)),
        turns=tuple(answer.turns),
        usage=answer.usage,
    )


def _group_of(answer: GroupAnswer) -> Group:
    segments = map(segment_of, answer.segments or ())
    group = group_of(answer, map(sample_of, answer.samples), segments)
    return replace(group, tree=group.tree and replace(group.tree, is_session=True))
