"""Text of a running sample, token by token, against the text of the whole response."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.requests.response_stream import TextStream
from engine.types.chat import ChatRequest, ChatResponse
from engine.types.samples import Sampling
from tests.engine.chats import TemplateChat, make_chat

TEXT = "naïve 中文 😀👩‍🔬 a<b>\n\tç"
USER = [{"role": "user", "content": "1 + 2"}]


def byte_tokenizer() -> Any:
    """One token per byte, as byte fallback has for rare characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="!")


def test_no_part_of_a_character_is_returned() -> None:
    tokenizer = byte_tokenizer()
    stream, tokens = TextStream(tokenizer), tokenizer.encode(TEXT)
    parts = [stream.text([token]) for token in tokens]
    assert len(parts) == len(TEXT.encode())
    assert "".join(parts) == TEXT == tokenizer.decode(tokens)
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


def test_cut_character_is_held_back() -> None:
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer)
    assert stream.text(tokenizer.encode("a中")[:-1]) == "a"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_parts_of_any_size_give_the_same_text(size: int) -> None:
    tokenizer = byte_tokenizer()
    stream, tokens = TextStream(tokenizer), tokenizer.encode(TEXT)
    parts = [stream.text(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    assert "".join(parts) == TEXT


@pytest.mark.parametrize("include", [False, True])
def test_text_that_may_begin_a_stop_string_is_held_back(include: bool) -> None:
    """As vLLM does; a stop string that is included needs no text to be held back."""
    tokenizer = byte_tokenizer()
    sampling = Sampling(max_tokens=9, stop=("END",), include_stop_str_in_output=include)
    stream, text = TextStream(tokenizer, sampling), "abcENabc"
    parts = [stream.text([token]) for token in tokenizer.encode(text)]
    held_back = 0 if include else len("END") - 1
    sent = ["".join(parts[:i]) for i in range(1, len(parts) + 1)]
    assert sent == [text[: max(i - held_back, 0)] for i in range(1, len(text) + 1)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateChat]:
    yield make_chat(tmp_path_factory.mktemp("chat"), reasoning_parser="qwen3")


def joined(parts: list[ChatResponse]) -> tuple[str, str]:
    return (
        "".join(part.reasoning or "" for part in parts),
        "".join(part.content or "" for part in parts),
    )


@pytest.mark.parametrize("text", ["<think>1+2</think>3", "<think>1+2", "1+2</think>34", "1+2"])
def test_reasoning_is_streamed_as_it_is_parsed_at_the_end(chat: TemplateChat, text: str) -> None:
    request = ChatRequest(messages=USER)
    prompt = chat.chat.encode(request)
    stream = chat.chat.response_stream(prompt=prompt, chat_request=request)
    parts = [stream.add([token]) for token in chat.tokenizer.encode(text)]
    whole = chat.chat_response(text, request)
    assert stream.is_parsed
    assert joined(parts) == (whole.reasoning or "", whole.content or "")


def test_without_a_parser_all_text_is_content(tmp_path: Path) -> None:
    plain = make_chat(tmp_path)
    stream = plain.chat.response_stream(chat_request=ChatRequest(messages=USER))
    parts = [stream.add([token]) for token in plain.tokenizer.encode("<think>1</think>2")]
    assert not stream.is_parsed
    assert joined(parts) == ("", "<think>1</think>2")
