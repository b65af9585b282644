"""Chat template options: the template's own variables, bounded. The tokenizer receives none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConversationRefused, PromptTooLong, RequestRefused, StartFailed
from engine.launch.chat_template import load_template
from tests.engine.chats import CONTEXT_TOKENS, TemplateChat, make_chat

ASKED = [{"role": "user", "content": "abc"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateChat]:
    yield make_chat(tmp_path_factory.mktemp("chat"))


def encode(chat: TemplateChat, **options: Any) -> list[int]:
    return chat.encode(ASKED, **options)


def test_variables_are_those_that_the_template_names(chat: TemplateChat) -> None:
    assert chat.chat.template_variables == {"enable_thinking", "repeat"}


def test_variable_of_the_template_is_rendered(chat: TemplateChat) -> None:
    assert chat.render(ASKED, enable_thinking=True) == "user: abcthinking"
    assert encode(chat, enable_thinking=False) == encode(chat)


def test_name_unknown_to_the_template_changes_nothing(chat: TemplateChat) -> None:
    assert encode(chat, thinking=True, no_such_name={"a": [1]}) == encode(chat)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "max_length", "max_length": 1_000_000_000},
        {"truncation": True, "max_length": 3},
        {"max_length": 3},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 1000}},
        {"documents": [{"title": "a", "text": "b"}]},
        {"continue_final_message": True},
        {"return_tensors": "pt"},
        {"chat_template": "{{ 'other' }}"},
        {"conversation": ASKED},
    ],
)
def test_arguments_of_the_tokenizer_are_refused(
    chat: TemplateChat, options: dict[str, Any]
) -> None:
    with pytest.raises(ConversationRefused) as refused:
        encode(chat, **options)
    assert refused.value.field == "chat_template_kwargs"
    assert next(iter(options)) in str(refused.value)
    assert "enable_thinking, repeat" in str(refused.value)


def test_arguments_of_the_tokenizer_at_neutral_values_are_dropped(
    chat: TemplateChat,
) -> None:
    neutral: dict[str, Any] = {
        "padding": False,
        "truncation": False,
        "max_length": None,
        "documents": [],
    }
    assert encode(chat, **neutral, tokenize=True, add_generation_prompt=True) == encode(chat)


def test_functions_called_by_a_template_are_not_replaced(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% for i in range(2) %}x{% endfor %}{{ namespace(a=1).a }}"
    chat = make_chat(tmp_path, template)
    assert chat.chat.template_variables == frozenset()
    assert chat.render(ASKED, range=7, namespace=7) == "abcxx1"


def test_each_template_of_a_model_has_its_own_variables(tmp_path: Path) -> None:
    """With tools a tokenizer uses its template `tool_use`, without tools its default."""
    templates = {"default": "d{{ plain }}", "tool_use": "t{{ for_tools }}{{ tools | length }}"}
    chat = make_chat(tmp_path, templates)
    options = {"plain": "p", "for_tools": "q"}
    assert chat.chat.template_variables == options.keys()
    assert chat.render(ASKED, [TOOL], **options) == "tq1"
    assert chat.render(ASKED, **options) == "dp"


@pytest.mark.parametrize("number", [10**9, -(10**9), 1e300, float("nan"), 10**400])
def test_large_number_is_refused(chat: TemplateChat, number: float) -> None:
    """A template may repeat a string that many times."""
    with pytest.raises(ConversationRefused, match="numbers"):
        encode(chat, repeat=[{"deep": number}])


def test_long_values_are_refused(chat: TemplateChat) -> None:
    with pytest.raises(ConversationRefused, match="characters"):
        encode(chat, enable_thinking={"a": ["x" * 2**17, "x" * 2**17]})


def test_range_is_bounded_by_the_sandbox(chat: TemplateChat) -> None:
    with pytest.raises(RequestRefused, match="failed to render"):
        encode(chat, repeat=100_001)


def test_rendered_prompt_that_cannot_fit_is_refused_before_tokenization(
    chat: TemplateChat,
) -> None:
    with pytest.raises(PromptTooLong, match="100009 characters"):
        encode(chat, repeat=100_000)


def test_prompt_is_never_truncated(chat: TemplateChat) -> None:
    assert len(encode(chat, repeat=CONTEXT_TOKENS - 8)) == CONTEXT_TOKENS
    with pytest.raises(PromptTooLong, match="at least 513 input tokens"):
        encode(chat, repeat=CONTEXT_TOKENS)


@pytest.mark.parametrize("in_a_file", [False, True])
def test_configured_template_replaces_the_one_of_the_tokenizer(
    tmp_path: Path, in_a_file: bool
) -> None:
    template = "{% for m in messages %}[{{ m.content }}{{ mark }}]{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(template, encoding="utf-8")
    configured = make_chat(tmp_path, chat_template=str(file) if in_a_file else template)
    assert configured.render(ASKED, mark="!") == "[abc!]"
    assert configured.chat.template_variables == {"mark"}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("/nowhere/chat.jinja", "/nowhere/chat.jinja: No such file or directory"),
        ("{% for %}", "not a Jinja template: "),
    ],
)
def test_unusable_template_is_refused_at_start(setting: str, text: str) -> None:
    with pytest.raises(StartFailed, match=rf"^engine\.chat_template: {text}"):
        load_template(setting)
