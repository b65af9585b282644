"""Reference implementation, in Hugging Face, of KV prediction from observations.

Mirrors what the engine loads, written for simplicity, and gives access to whole distributions.

Shape [L, 2, H, T, D]: L layers, keys and values, H heads, T tokens, D head_dim; all in float32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from coppice.wire.rollouts import PromptSpan
from engine.types.kv import ExportSlot
from kernels.rope_shift import parse_rotary, shift_keys
from service.kv.arena import Extent
from service.kv.spans.index import SpanEntry, SpanKey
from service.kv.spans.observations import Observation, PromptContext
from service.kv.spans.prediction_sources import (
    PredictionSources,
    find_candidates,
    pairs_to_compare,
    select_observations,
)
from service.kv.spans.prompt_template import PromptTemplate, Scope, joined, template_of

SCOPE = Scope("nobody", None)


class HfPredictor:
    """Predicts prompt KV for one model from observations.

    Each span and each observation is prefilled once.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rotary = parse_rotary(model.config.rope_parameters, model.config.head_dim)
        self._alone: dict[tuple[int, ...], torch.Tensor] = {}
        self._of: dict[Observation, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def observed(self, parts: Sequence[PromptSpan]) -> Observation:
        template, prompt = template_of(parts), joined(parts)
        observed = Observation(
            context=PromptContext(SCOPE, 0, template.context),
            template=template,
            real=_nowhere(),
            bases={},
        )
        bases = [self.alone(prompt[s.start : s.end]) for s in template.sections]
        self._of[observed] = self.computed(prompt[:-1]), bases
        return observed

    def computed(self, token_ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            cache = self._model(torch.tensor([list(token_ids)]), use_cache=True).past_key_values
        return torch.stack([torch.stack([at.keys[0], at.values[0]]) for at in cache.layers]).float()

    def alone(self, token_ids: Sequence[int]) -> torch.Tensor:
        key = tuple(token_ids)
        if key not in self._alone:
            self._alone[key] = self.computed(key) if key else torch.empty(0)
        return self._alone[key]

    def assemble(
        self,
        parts: Sequence[PromptSpan],
        observations: Sequence[Observation],
        response: Sequence[int],
        *,
        max_entropy: float,
    ) -> torch.Tensor | None:
        """Log-probabilities [T, V] at a response's tokens after a prompt with predicted KV.

        None if there is too little to predict the prompt from; then it is prefilled.
        """
        template, prompt = template_of(parts), joined(parts)
        there = [
            observed for observed in observations if observed.template.context == template.context
        ]
        found = find_candidates(template, there)
        if found is None:
            return None
        distances = {
            (index, observed): self._distance(prompt, template, index, observed)
            for index, observed in pairs_to_compare(template, found)
        }
        choice = select_observations(template, found, distances, max_entropy)
        if choice is None:
            return None
        values = [
            self._taken(template, index, one.exact_match)
            if one.exact_match is not None
            else self._predicted(prompt, template, index, choice)
            for index, one in enumerate(found)
        ]
        return self._forward(torch.cat(values, dim=3), prompt, response)

    def _forward(
        self, values: torch.Tensor, prompt: Sequence[int], response: Sequence[int]
    ) -> torch.Tensor:
        cache = DynamicCache(config=self._model.config)
        for layer, (keys, others) in enumerate(values):
            cache.update(keys[None], others[None], layer)
        tail = [*prompt[values.shape[3] :], *response]
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([tail]), past_key_values=cache).logits[0]
        return found[-len(response) - 1 : -1].log_softmax(-1)

    def _distance(
        self, prompt: Sequence[int], template: PromptTemplate, index: int, observed: Observation
    ) -> float:
        stretch = template.sections[index]
        ours = self.alone(prompt[stretch.start : stretch.end])
        theirs = self._of[observed][1][index][:, :, :, : stretch.num_tokens]
        return float((ours - theirs)[:, 1].double().norm())

    def _taken(self, template: PromptTemplate, index: int, observed: Observation) -> torch.Tensor:
        """KV of a prompt span in an observation, shifted for the new prompt."""
        ours, theirs = template.sections[index], observed.template.sections[index]
        real = self._of[observed][0][:, :, :, theirs.start : theirs.start + ours.num_tokens]
        return self._moved(real, ours.start - theirs.start)

    def _predicted(
        self,
        prompt: Sequence[int],
        template: PromptTemplate,
        index: int,
        choice: PredictionSources,
    ) -> torch.Tensor:
        stretch, weights = template.sections[index], choice.weights[index]
        reals = {observed: self._taken(template, index, observed) for observed in weights}
        if stretch.cache_key is None:
            mean = sum(weights[observed] * reals[observed] for observed in weights)
            assert isinstance(mean, torch.Tensor), "there are observations"
            nearest = max(weights, key=lambda observed: weights[observed])
            return torch.cat([reals[nearest][:1], mean[1:]])
        base = self.alone(prompt[stretch.start : stretch.end])
        out = self._moved(base, stretch.start)
        if index == 0:
            return out
        bases = {a: self._of[a][1][index][:, :, :, : stretch.num_tokens] for a in weights}
        for observed, share in _shares(base, bases).items():
            offset = reals[observed] - self._moved(bases[observed], stretch.start)
            out[1:] += (share[None, :, None, :, None] * offset)[1:]
        return out

    def _moved(self, values: torch.Tensor, shift: int) -> torch.Tensor:
        keys = shift_keys(values[:, 0], shift, self._rotary)
        return torch.stack([keys, values[:, 1]], dim=1)


def _shares(
    base: torch.Tensor, bases: Mapping[Observation, torch.Tensor]
) -> dict[Observation, torch.Tensor]:
    """Prediction weights [2, T] of each observation for K and V of a span's tokens.

    The remaining weight is that of a zero offset.
    """
    others = [*bases.values(), torch.zeros_like(base)]
    far = torch.stack([(base - other).pow(2).sum((0, 2, 4)) for other in others])
    near = 1 / far.double().clamp(min=1e-30)
    return dict(zip(bases, (near / near.sum(0)).float(), strict=False))


def _nowhere() -> SpanEntry:
    slot = ExportSlot(arena=Path("/nowhere"), offset=0, status_offset=0, num_tokens=0)
    return SpanEntry(slot=slot, extent=Extent(0, 0), key=SpanKey(SCOPE, 0, "", b""))
