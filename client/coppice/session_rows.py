"""Token rows of an agent session for verl, prime-rl, rLLM and TRL, one per root-to-leaf path.

A row is the path from the root of a tree to one leaf. Its methods return the fields of verl,
prime-rl and rLLM; `trl_output` returns those of TRL. None of these packages is imported.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, dropwhile, pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coppice.rollout_results import Group, Segment, Tree
from coppice.session_results import SessionResult, hidden_ends
from coppice.wire.columns.kv_version_spans import KvVersionSpan
from coppice.wire.columns.support import ALL, Support
from coppice.wire.columns.token_columns import TokenColumns
from coppice.wire.columns.weights_version_spans import VersionSpan


# NumPy's == is elementwise, so rows compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionRow:
    """Tokens from the root of a session's tree to one leaf.

    The prompt ends before the first sampled token. `loss_mask` and `logprobs` have one value per
    response token. The mask is true for tokens to train on. Context has the logprob 0. Token
    indices in `versions` are those of the response; positions in `kv_versions` start with the
    prompt. `turn_starts` are the response indices at which the turns of the path begin. `support`,
    if it was requested, has the sets of token ids that the response tokens were sampled from, and
    the whole vocabulary for context. `is_hidden_end`: the leaf is the end of a turn that is not in
    its text, a stop token or a stop string, and another row continues the turn without it.
    """

    session: str
    leaf: str
    prompt_ids: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionSpan, ...]
    kv_versions: tuple[KvVersionSpan, ...]
    reward: float | None
    turn_starts: tuple[int, ...] = ()
    support: Support | None = None
    is_hidden_end: bool = False

    @property
    def num_turns(self) -> int:
        """Number of turns of the path."""
        return len(self.turn_starts)

    @property
    def num_trained(self) -> int:
        """Number of tokens to train on."""
        return int(self.loss_mask.sum())

    def verl_output(self) -> dict[str, Any]:
        """Arguments of verl's `AgentLoopOutput`.

        ValueError is raised for tokens that were sampled from a part of the vocabulary.
        """
        self._check_support("verl")
        return {
            "prompt_ids": self.prompt_ids.tolist(),
            "response_ids": self.response_ids.tolist(),
            "response_mask": self.loss_mask.astype(int).tolist(),
            "response_logprobs": self.logprobs.tolist(),
            "reward_score": self.reward,
            "num_turns": self.num_turns,
            "metrics": {},
            "extra_fields": self._origin(),
        }

    def prime_rl_sample(self, *, env_name: str, temperature: float = 1.0) -> dict[str, Any]:
        """Arguments of prime-rl's `TrainingSample`; give the temperature of the session.

        The arrays contain the prompt. prime-rl computes the advantages from the rewards. ValueError
        is raised for tokens that were sampled from a part of the vocabulary.
        """
        self._check_support("prime-rl")
        num_prompt, num_tokens = len(self.prompt_ids), len(self.prompt_ids) + len(self.response_ids)
        return {
            "token_ids": [*self.prompt_ids.tolist(), *self.response_ids.tolist()],
            "mask": [False] * num_prompt + self.loss_mask.tolist(),
            "logprobs": [0.0] * num_prompt + self.logprobs.tolist(),
            "temperatures": [temperature] * num_tokens,
            "env_name": env_name,
        }

    def rllm_trajectory(self, *, name: str = "agent") -> dict[str, Any]:
        """Arguments of rLLM's `Trajectory`, with one `Step` per turn with trained tokens.

        A step's prompt has all tokens before its trained ones. ValueError is raised for tokens that
        were sampled from a part of the vocabulary.
        """
        self._check_support("rLLM")
        steps = [self._step(*run) for run in _runs(self.loss_mask, self.turn_starts)]
        steps[-1]["done"] = True
        return {"name": name, "steps": steps, "reward": self.reward, "metadata": self._origin()}

    def _step(self, start: int, stop: int) -> dict[str, Any]:
        earlier = self.response_ids[:start].tolist()
        return {
            "prompt_ids": [*self.prompt_ids.tolist(), *earlier],
            "response_ids": self.response_ids[start:stop].tolist(),
            "logprobs": self.logprobs[start:stop].tolist(),
            "done": False,
        }

    def _check_support(self, target: str) -> None:
        """Raises ValueError if a trained token was sampled from a part of the vocabulary."""
        rows = () if self.support is None else compress(self.support.rows, self.loss_mask)
        if any(row[0] != ALL for row in rows):
            raise ValueError(
                f"tokens of row {self.leaf} of session {self.session} were sampled from a part of "
                f"the vocabulary, and {target} computes logprobs over all of it: sample without "
                "top_k, top_p and min_p, or train with coppice.train"
            )

    def _origin(self) -> dict[str, Any]:
        versions = [span.model_dump() for span in self.versions]
        return {"session": self.session, "leaf": self.leaf, "versions": versions}


def session_rows(result: SessionResult, *, train_once: bool = True) -> list[SessionRow]:
    """One row per leaf of a session's trees that has tokens to train on.

    With `train_once`, a sampled token that several rows share is trained in the first one only;
    in the others its mask is false. Otherwise it is trained in each of them. A leaf without a
    reward of its own has that of the session. Rows of hidden ends follow the others of their tree.
    """
    trained: set[str] = set()
    rows = []
    for group in result.groups:
        tree = group.tree or Tree(segments=(), leaves=(), is_session=True)
        hidden = hidden_ends(result, tree)
        for leaf in sorted(tree.leaves, key=lambda leaf: leaf in hidden):
            path = tree.path(leaf)
            if not any(segment.sampled for segment in path):
                continue
            row = _row(result, group, path, trained if train_once else set())
            trained.update(segment.id for segment in path)
            if row.num_trained:
                starts = tuple(_turn_starts(path, tree.continuations()))
                rows.append(replace(row, turn_starts=starts, is_hidden_end=leaf in hidden))
    return rows


def trl_output(results: Iterable[SessionResult], *, longest: bool = False) -> dict[str, list[Any]]:
    """Result of TRL's `rollout_func`, of one session per prompt, in the order of the prompts.

    TRL needs exactly one row per prompt. Hidden ends of turns are left out, and not trained.
    ValueError is raised for a session with several other rows, or, with `longest`, the row with the
    most sampled tokens is used and the others are not trained. ValueError is also raised for tokens
    that were sampled from a part of the vocabulary. `reward` is an extra field, which TRL passes to
    reward functions.
    """
    rows = [_only_row(result, longest=longest) for result in results]
    for row in rows:
        row._check_support("TRL")
    return {
        "prompt_ids": [row.prompt_ids.tolist() for row in rows],
        "completion_ids": [row.response_ids.tolist() for row in rows],
        "logprobs": [row.logprobs.tolist() for row in rows],
        "env_mask": [row.loss_mask.astype(int).tolist() for row in rows],
        "reward": [row.reward for row in rows],
    }


def _only_row(result: SessionResult, *, longest: bool) -> SessionRow:
    rows = session_rows(result, train_once=not longest)
    rows = [row for row in rows if not row.is_hidden_end]
    if not rows or (len(rows) > 1 and not longest):
        raise ValueError(f"session {result.id} has {len(rows)} rows, and TRL needs one per prompt")
    return max(rows, key=lambda row: row.num_trained)


def _row(
    result: SessionResult, group: Group, path: Sequence[Segment], trained: set[str]
) -> SessionRow:
    """The row of a path; segments of `trained` are masked."""
    context = list(takewhile(lambda segment: not segment.sampled, path))
    response = path[len(context) :]
    masks = [_constant(s, s.sampled and s.id not in trained) for s in response]
    columns = TokenColumns.joined(response)
    return SessionRow(
        session=result.id,
        leaf=path[-1].id,
        prompt_ids=np.concatenate([_prompt(group), *(segment.token_ids for segment in context)]),
        response_ids=columns.token_ids,
        loss_mask=np.concatenate(masks),
        logprobs=np.nan_to_num(columns.logprobs),
        versions=columns.versions,
        kv_versions=columns.kv_versions,
        reward=(result.rewards or {}).get(path[-1].id, result.reward),
        support=columns.support,
    )


def _turn_starts(path: Sequence[Segment], continuations: frozenset[str]) -> Iterator[int]:
    """Indices in the response of a path at which its turns begin."""
    at = 0
    for segment in dropwhile(lambda segment: not segment.sampled, path):
        if segment.sampled and segment.id not in continuations:
            yield at
        at += len(segment.token_ids)


_NO_TOKENS = np.zeros(0, np.int64)


def _prompt(group: Group) -> NDArray[np.int64]:
    return _NO_TOKENS if group.prompt_token_ids is None else group.prompt_token_ids


def _constant(segment: Segment, value: bool) -> NDArray[np.bool_]:
    return np.full(len(segment.token_ids), value)


def _runs(mask: NDArray[np.bool_], starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of adjacent true values that contain no start except at their beginning."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    for start, stop in pairwise(sorted({*edges, *starts})):
        if mask[start]:
            yield start, stop
