"""Fields of responses that vLLM 0.32 does not have: weights versions and supports of samples.

`return_weight_versions` has the name and the meaning that it has in vLLM 0.33.
"""

import json
from collections.abc import AsyncIterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Self

from vllm.exceptions import VLLMValidationError

from engine.protocol.openai_server import SampleEnd

Ends = Mapping[int, SampleEnd]
"""Ends of the samples by the index of the choice."""
MESSAGES = ("message", "message_delta")
"""Types of Anthropic's response, and of the event that has the end of its sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraFields:
    """The extra fields that a request wants in its response.

    `names_tokens`: logprobs of token ids have the name of the token, too, as before vLLM 0.32.
    prime-rl's client reads it.
    """

    return_weight_versions: bool = False
    return_support: bool = False
    names_tokens: bool = False

    @classmethod
    def taken_from(cls, fields: MutableMapping[str, Any]) -> Self:
        """The extra fields of a request body, which are removed from it."""
        wanted = dict[str, bool]()
        for name in ("return_weight_versions", "return_support"):
            value = fields.pop(name, None)
            if value not in (None, True, False):
                raise VLLMValidationError("must be true or false", parameter=name)
            wanted[name] = bool(value)
        params = fields.get("sampling_params")
        has_logprobs = isinstance(params, Mapping) and params.get("logprobs") is not None
        return cls(**wanted, names_tokens=has_logprobs)

    def __bool__(self) -> bool:
        return self.return_weight_versions or self.return_support or self.names_tokens

    def add(self, response: dict[str, Any], ends: Ends) -> None:
        """Add the fields to a response, or to the event of a stream that has a sample's end."""
        if "choices" in response:
            for choice in response["choices"]:
                if self.names_tokens:
                    _name_tokens(choice)
                if choice.get("finish_reason") is not None:
                    choice.update(self._of(ends[choice["index"]]))
        elif response.get("type") == "response.completed":
            response["response"].update(self._of(ends[0]))
        elif response.get("object") == "response" or response.get("type") in MESSAGES:
            response.update(self._of(ends[0]))

    def _of(self, end: SampleEnd) -> dict[str, Any]:
        versions = {"weight_versions": list(end.versions)} if self.return_weight_versions else {}
        return versions | ({"support": end.support} if self.return_support else {})

    async def in_events(self, events: AsyncIterator[str], ends: Ends) -> AsyncIterator[str]:
        """The events of a stream, with the fields added to those with a sample's end."""
        async for event in events:
            head, mark, data = event.partition("data: ")
            if not mark or not data.startswith("{"):
                yield event
                continue
            value = json.loads(data)
            self.add(value, ends)
            yield f"{head}{mark}{json.dumps(value, ensure_ascii=False)}\n\n"


def _name_tokens(choice: dict[str, Any]) -> None:
    for entry in (choice.get("logprobs") or {}).get("content") or ():
        for each in (entry, *entry["top_logprobs"]):
            if "token_id" in each:  # not with texts of the tokens
                each["token"] = f"token_id:{each['token_id']}"
