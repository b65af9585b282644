"""Ends of messages in templates that mark them unusually or not at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.errors import NoTurnEnd, PromptTooLong
from engine.types.chat import ChatRequest
from tests.engine.chats import CONTEXT_TOKENS, TEMPLATE, TemplateChat, make_chat

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = {"role": "user", "content": "1+2"}
ANSWER = {"role": "assistant", "content": "3"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "3"}
# Only the user's messages end with the EOS token.
USER_ENDS = """\
{%- for m in messages %}{{ m.role }}:{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{%- if m.role == 'user' %}<|end|>{% endif %}{% endfor %}"""


def after(chat: TemplateChat, messages: Sequence[Any], *, last: str = "3", **fields: Any) -> str:
    (last_token,) = chat.tokenizer.encode(last)
    conversation = ChatRequest(messages=messages, **fields)
    return str(
        chat.tokenizer.decode(chat.chat.encode_after(conversation, 1, last_token=last_token))
    )


@pytest.mark.parametrize("last", ["3", "<|end|>"])
def test_without_a_special_token_all_text_after_the_content_follows(
    tmp_path: Path, last: str
) -> None:
    chat = make_chat(tmp_path, TEMPLATE)
    assert after(chat, [ASKED, ANSWER, ASKED], last=last) == "user: 1+2"
    assert after(chat, [ASKED, ANSWER]) == ""


def test_tool_call_without_a_special_token_has_no_end(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, TEMPLATE)
    with pytest.raises(NoTurnEnd):
        after(chat, [ASKED, CALLING, RESULT])


def test_end_of_a_later_message_is_not_taken(tmp_path: Path) -> None:
    """Else the text of the tool's result would be lost."""
    chat = make_chat(tmp_path, USER_ENDS)
    with pytest.raises(NoTurnEnd):
        after(chat, [ASKED, CALLING, RESULT, ASKED])
    assert after(chat, [ASKED, ANSWER, RESULT, ASKED]) == "tool:3user:1+2<|end|>"


def test_message_that_the_template_leaves_out_has_no_end(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, "{{ messages[0].content }}{{ messages[-1].content }}")
    with pytest.raises(NoTurnEnd, match="does not render"):
        after(chat, [ASKED, ANSWER, ASKED])


def test_white_space_before_the_end_belongs_to_a_cut_sample(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} <|end|>{% endfor %}"
    chat = make_chat(tmp_path, template)
    assert after(chat, [ASKED, ANSWER, ASKED]) == " <|end|>1+2 <|end|>"
    assert after(chat, [ASKED, ANSWER, ASKED], last="<|end|>") == "1+2 <|end|>"


def test_text_of_the_message_does_not_matter(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content | trim }}<|end|>{% endfor %}"
    chat = make_chat(tmp_path, template)
    for content in ("3", "<|end|>", " ", "mark", "{{ x }}", "x" * 2 * CONTEXT_TOKENS):
        assert after(chat, [ASKED, {**ANSWER, "content": content}, ASKED]) == "<|end|>1+2<|end|>"


def test_later_messages_that_cannot_fit_are_refused(tmp_path: Path) -> None:
    chat = make_chat(tmp_path, USER_ENDS)
    with pytest.raises(PromptTooLong):
        after(chat, [ASKED, ANSWER, {**ASKED, "content": "1" * 100 * CONTEXT_TOKENS}])
