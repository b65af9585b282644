"""Chat template of the setting `engine.chat_template`, and the Jinja environment that parses it."""

from pathlib import Path

import jinja2.ext
import jinja2.sandbox
from vllm.renderers.hf import AssistantTracker

from engine.errors import StartFailed


def load_template(setting: str | None) -> str | None:
    """The template of the setting `engine.chat_template`: a file's text, or the setting itself.

    Raises StartFailed.
    """
    if setting is None:
        return None
    try:
        text = setting if "{" in setting else Path(setting).expanduser().read_text("utf-8")
        template_environment().parse(text)
    except OSError as error:
        raise StartFailed(f"engine.chat_template: {setting}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartFailed(f"engine.chat_template: {setting} is not UTF-8 text") from None
    except jinja2.TemplateError as error:
        raise StartFailed(f"engine.chat_template: not a Jinja template: {error}") from None
    return text


def template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja environment with the extensions of transformers."""
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=[AssistantTracker, jinja2.ext.loopcontrols]
    )
