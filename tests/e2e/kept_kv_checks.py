"""Updates in both KV modes under chains, a tree, a session and handles, with drafts.

The oracle computes the KV of each span of positions with the version in `kv_versions`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import torch

from coppice import Branching, ChainKeepKv, Kv, KvVersionSpan
from coppice.rollout_results import RolloutResult
from coppice.wire.columns.kv_version_spans import ActivationKv
from tests.e2e.prompt_kv_checks import assert_all_match_model
from tests.e2e.scene import Scene
from tests.engine.greedy import TIE

Models = Mapping[str, Any]

CHAIN = [(5 * i) % 400 + 2 for i in range(150)]
TREE = [(3 * i) % 400 + 2 for i in range(70)]
TALK = [(11 * i) % 400 + 2 for i in range(120)]
NUM = 20


async def check_kept_kv(system: Scene, models: Models) -> None:
    """Call it while v8 is active; it is active again at the end."""
    await check_updates(system, models, "keep_running", ["v8", "v7"])
    await check_updates(system, models, "reset", ["v7", "v8"])


async def check_updates(
    system: Scene, models: Models, mode: ActivationKv, versions: Sequence[str]
) -> None:
    before, after = versions
    agent = await start_session(system)
    first = await system.greedy([CHAIN], NUM, keep_kv=ChainKeepKv())
    call = await call_session(system, agent, TALK)
    tree = asyncio.create_task(grow_tree(system))
    handled = await system.rollouts.rollout([TALK], n=2, max_tokens=4, kv=Kv())
    answer = await system.rollouts.activate_weights(after, kv=mode, allow_rollback=True)
    assert (answer.num_kept_tokens > 0) == (mode == "keep_running")
    result = await system.greedy(
        [CHAIN],
        3 * NUM,
        continue_from=[first.groups[0].samples],
        keep_kv=ChainKeepKv(chain=first.id),
    )
    [sample] = result.groups[0].samples
    check_greedy(models, CHAIN, sample.token_ids.tolist(), sample.kv_versions, NUM)
    await call_session(system, agent, [*TALK, *call, 9])
    ended = await system.rollouts.sessions.finish(agent["id"])
    [group] = ended.groups
    assert group.tree is not None and group.prompt_token_ids is not None
    last = group.tree.segment(group.tree.leaves[0])
    path = [token for each in group.tree.path(last.id)[:-1] for token in each.token_ids.tolist()]
    context = [*group.prompt_token_ids.tolist(), *path]
    check_greedy(models, context, last.token_ids.tolist(), last.kv_versions, 0)
    for spans in (sample.kv_versions[-2:], last.kv_versions):
        found = [span.version for span in spans if span.first_token == spans[-1].first_token]
        assert found == ([before, after] if mode == "keep_running" else [after])
    check_tree(models, await tree)
    await assert_all_match_model(system.served, handled.groups, [TALK], before, models[before])


async def grow_tree(system: Scene) -> RolloutResult:
    branching = Branching(mode="interval", interval=64, max_depth=2, max_leaves=4)
    return await system.greedy([TREE], 160, branching=branching, keep_kv=ChainKeepKv())


def check_tree(models: Models, result: RolloutResult) -> None:
    """The KV of every segment is that of its path, without a gap, and ends before its last token.

    The segment is greedy over it, also where an update was inside a block.
    """
    tree = result.groups[0].tree
    assert tree is not None
    for segment in tree.segments:
        *front, tokens = [each.token_ids.tolist() for each in tree.path(segment.id)]
        context = [*TREE, *(token for each in front for token in each)]
        length = len(context) + len(tokens)
        spans = segment.kv_versions
        assert {span.first_token for span in spans} == {0}
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == length - 1
        assert spans[-1].version == segment.versions[-1].version
        check_greedy(models, context, tokens, spans, 0)


async def start_session(system: Scene) -> dict[str, Any]:
    answer = await system.served.http.post(
        "/v1/sessions",
        json={
            "keep_kv": {},
            "sampling": {"temperature": 0.0, "max_tokens": NUM, "ignore_eos": True},
        },
    )
    assert answer.status_code == 200, answer.text
    started: dict[str, Any] = answer.json()["sessions"][0]
    return started


async def call_session(system: Scene, agent: dict[str, Any], prompt: list[int]) -> list[int]:
    async with httpx.AsyncClient(base_url=system.served.url, timeout=60) as http:
        answer = await http.post(
            f"{agent['path']}/v1/completions",
            headers={"authorization": f"Bearer {agent['key']}"},
            json={"model": "any", "prompt": prompt, "return_token_ids": True},
        )
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def check_greedy(
    models: Models,
    prompt: list[int],
    tokens: list[int],
    kv_versions: Sequence[KvVersionSpan],
    start: int,
) -> None:
    """The tokens from `start` on are greedy over KV of the stated versions."""
    first = max(span.first_token for span in kv_versions)
    spans = [span for span in kv_versions if span.first_token == first]
    everything, cache, logits = [*prompt, *tokens], None, []
    with torch.inference_mode():
        for span in spans:
            part = torch.tensor([everything[span.start : span.end]])
            output = models[span.version](part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits[0])
    rows = torch.cat(logits)[len(prompt) + start - 1 :]
    chosen = rows.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
    assert (rows.max(dim=1).values - chosen).max() <= TIE
