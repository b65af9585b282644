"""The stores of vLLM's Responses class, over the responses that the service keeps for a caller."""

from typing import Any

from pydantic_core import from_json, to_json
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call

from engine.protocol.openai_server import ApiCall


class StoredMessages:
    """Messages by the id of the response that they belong to, as vLLM's `msg_store`."""

    def __init__(self, call: ApiCall) -> None:
        self._call = call
        self.of_request: list[Any] = []

    def get(self, response_id: str) -> list[Any] | None:
        found = self._call.stored_response(response_id)
        return None if found is None else from_json(found.messages)

    def __setitem__(self, response_id: str, messages: list[Any]) -> None:
        self.of_request = messages


class StoredResponses:
    """Responses by their id, as vLLM's `response_store`.

    From the output of an earlier response vLLM takes only texts. A session needs the tool calls,
    too, so the output is kept as messages there.
    """

    def __init__(self, call: ApiCall, messages: StoredMessages) -> None:
        self._call = call
        self._messages = messages

    def get(self, response_id: str) -> ResponsesResponse | None:
        found = self._call.stored_response(response_id)
        if found is None:
            return None
        response = ResponsesResponse.model_validate_json(found.response)
        if self._call.in_session:
            response.output = []
        return response

    def __setitem__(self, response_id: str, response: ResponsesResponse) -> None:
        content = response.model_dump_json(by_alias=True).encode()
        messages = self._messages.of_request
        if self._call.in_session:
            messages = [*messages, *construct_chat_messages_with_tool_call(response.output)]
        self._call.store_response(response_id, content, to_json(messages))
