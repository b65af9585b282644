"""vLLM's model runner as the speculator uses it, with scripted samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.speculation.cpu_speculator import Speculator
from engine.speculation.request_table import GROUP_ARG, NO_DRAFTS_ARG

WIDTH = 256
EOS = 99


@dataclass
class Runner:
    """`text` has each request's tokens, `computed` the number of tokens in its last step."""

    requests: dict[str, Any] = field(default_factory=dict)
    text: dict[str, list[int]] = field(default_factory=dict)
    input_batch: Any = field(default_factory=lambda: input_batch([], {}))
    query_start_loc: Any = field(default_factory=lambda: SimpleNamespace(np=np.zeros(1, np.int32)))

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        group: str | None = None,
        drafts: bool = True,
        seed: int | None = None,
        min_p: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        min_tokens: int = 0,
        max_tokens: int = 100,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        named = ({GROUP_ARG: group} if group else {}) | ({} if drafts else {NO_DRAFTS_ARG: True})
        sampling = SimpleNamespace(
            extra_args=named or None,
            seed=seed,
            min_p=min_p,
            min_tokens=min_tokens,
            logit_bias=logit_bias,
            max_tokens=max_tokens,
            eos_token_id=EOS,
            stop_token_ids=list(stop_token_ids),
        )
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=list(prompt), sampling_params=sampling, output_token_ids=[]
        )
        self.text[name] = list(prompt)

    def say(self, name: str, tokens: Sequence[int]) -> None:
        """Adds tokens in steps that the speculator did not observe."""
        self.text[name] += tokens
        self.requests[name].output_token_ids += tokens
        self.input_batch = input_batch(self.input_batch.req_ids, self.text)

    def forget(self, name: str) -> None:
        del self.requests[name], self.text[name]

    def step(
        self, speculator: Speculator, said: dict[str, list[int]], computed: int | None = None
    ) -> dict[str, list[int]]:
        """Runs a step and returns its drafts.

        The batch has these rows in this order, each with its sampled tokens: none if its prompt is
        not completely prefilled.
        """
        self.input_batch.req_ids = list(said)
        for name, tokens in said.items():
            self.say(name, tokens)
        each = [len(tokens) if computed is None else computed for tokens in said.values()]
        self.query_start_loc.np = np.concatenate(([0], np.cumsum(each))).astype(np.int32)
        inputs = self.input_batch = input_batch(list(said), self.text)
        drafts = speculator.drafts(
            list(said.values()), inputs.num_tokens_no_spec, inputs.token_ids_cpu
        )
        return dict(zip(said, drafts, strict=True))


def input_batch(ids: Sequence[str], text: dict[str, list[int]]) -> Any:
    """vLLM's input batch with the tokens of these rows."""
    there = [text.get(name, []) for name in ids]
    rows = np.zeros((len(ids), WIDTH), np.int32)
    for row, tokens in zip(rows, there, strict=True):
        row[: len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens in there], np.int32)
    return SimpleNamespace(req_ids=list(ids), num_tokens_no_spec=lengths, token_ids_cpu=rows)
