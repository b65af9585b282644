"""Everything that an engine can raise.

EngineError
|- EngineDead          the engine process is gone or can no longer be trusted; start a new one
|- RequestRefused      the engine refuses this sample's parameters; nothing was started
|  |- ConversationRefused  a field of a chat request cannot be taken; the message may be shown
|  `- PromptTooLong        a conversation does not fit into the context; the message may be shown
|- CheckpointRefused   the weights do not fit the model; nothing was touched
|- DrafterRefused      another drafter is on trial, or the version is taken; nothing was touched
|- LoadFailed          loading broke off after the check; the previous weights serve on
`- StartFailed         the engine could not be started with these settings
"""


class EngineError(Exception):
    """Base of all engine errors."""


class EngineDead(EngineError):
    """The engine process is gone or can no longer be trusted."""


class RequestRefused(EngineError):
    """The engine refuses this sample's parameters."""


class ConversationRefused(RequestRefused):
    """A field of a chat request that the engine does not take, by its name in OpenAI's request."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(RequestRefused):
    """A rendered conversation that does not fit into the context."""


class CheckpointRefused(EngineError):
    """The weights do not fit the model. The message names what is wrong, never a path."""


class DrafterRefused(EngineError):
    """Another drafter is on trial, or the version is taken."""


class LoadFailed(EngineError):
    """Loading broke off after the check; the previous weights were put back."""


class StartFailed(EngineError):
    """The engine could not be started with these settings."""
