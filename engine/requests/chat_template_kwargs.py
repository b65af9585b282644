"""Check of a request's chat_template_kwargs: only variables of the template, bounded values.

vLLM passes chat_template_kwargs to the tokenizer's `apply_chat_template`, whose own parameters pad
and truncate prompts: `max_length` alone can exhaust memory. So only template variables are passed.
"""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2.defaults import DEFAULT_NAMESPACE
from transformers import PreTrainedTokenizerBase
from vllm.renderers.hf import HfRenderer, resolve_chat_template

from engine.errors import ConversationRefused
from engine.launch.chat_template import template_environment

log = logging.getLogger(__name__)
MAX_CHARACTERS = 2**18
"""Limit of the characters in one request's options. A template may render them per message."""
MAX_NUMBER = 2**20
"""Limit of numbers, since a template may repeat a string that often.

Jinja's sandbox limits only `range`.
"""


# Used by vLLM's encoders for models without a Jinja template, such as DeepSeek-V3.2 and Kimi-K3.
ENCODER_VARIABLES = frozenset(
    {"drop_thinking", "enable_thinking", "reasoning_effort", "thinking", "thinking_effort"}
)


# Functions that transformers defines for templates.
_GLOBALS = {*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"}


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


_ARGUMENTS = frozenset(
    _parameters(PreTrainedTokenizerBase.apply_chat_template)
    | _parameters(PreTrainedTokenizerBase.__call__)
    | {"messages"}
)


# Set by the request's own fields, or without effect on the prompt.
_IGNORED_ARGUMENTS = {"add_generation_prompt", "return_dict", "tokenize"}


def template_variables(
    renderer: Any, model_config: Any, configured: str | None = None
) -> frozenset[str]:
    """Names of the variables that the chat templates use, with and without tools.

    The templates are the model's, unless one is `configured`.
    """
    if not isinstance(renderer, HfRenderer):
        return ENCODER_VARIABLES
    tokenizer: Any = renderer.get_tokenizer()
    found: set[str] = set()
    choices: tuple[list[Any] | None, ...] = (None, [])
    for tools in choices:
        template = resolve_chat_template(tokenizer, configured, tools, model_config=model_config)
        found |= _undeclared(template or "")
    return frozenset(found - _ARGUMENTS - _GLOBALS)


def template_options(given: Mapping[str, Any], variables: frozenset[str]) -> dict[str, Any]:
    """The request's options that the chat template uses. Raises ConversationRefused."""
    arguments = sorted(n for n in given.keys() & _ARGUMENTS - _IGNORED_ARGUMENTS if given[n])
    if arguments:
        taken = ", ".join(sorted(variables)) or "none"
        raise _refused(
            f"{', '.join(arguments)}: not variables of the chat template, which are: {taken}"
        )
    options = {name: value for name, value in given.items() if name in variables}
    if _num_characters(options) > MAX_CHARACTERS:
        raise _refused(f"the values exceed {MAX_CHARACTERS} characters in total")
    return options


def _undeclared(template: str) -> set[str]:
    """Names that a chat template reads but does not define, found in the same way as in vLLM."""
    try:
        return set(jinja2.meta.find_undeclared_variables(template_environment().parse(template)))
    except jinja2.TemplateError as error:
        log.warning("the chat template cannot be parsed: %s", error)
        return set()


def _num_characters(value: object) -> int:
    match value:
        case str():
            return len(value)
        case int() | float() if not abs(value) <= MAX_NUMBER:  # NaN compares as false
            raise _refused(f"numbers must be between -{MAX_NUMBER} and {MAX_NUMBER}")
        case Mapping():
            return sum(_num_characters(k) + _num_characters(v) for k, v in value.items())
        case list() | tuple():
            return sum(map(_num_characters, value))
    return 1


def _refused(message: str) -> ConversationRefused:
    return ConversationRefused("chat_template_kwargs", message)
