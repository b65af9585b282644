"""Exception classes of the engine: refused requests, failed loads, a dead engine.

EngineError
|- EngineDead          the engine process has exited or must not be used; start a new one
|- RequestRefused      invalid parameters of a sample; nothing was started
|  |- ConversationRefused  invalid field of a chat request; the message may be shown to the client
|  |- SamplingRefused      invalid sampling parameter; the message may be shown to the client
|  |- NoTurnEnd            the chat template does not mark where a message ends
|  `- PromptTooLong        rendered chat longer than the context; the message may be shown
|- CheckpointRefused   the weights do not fit the model; nothing was changed
|- DrafterRefused      another drafter is under test, or its version exists; nothing was changed
|- LoadFailed          loading failed after validation; the previous weights are still served
|  `- FilesRestored         the weights of an earlier version are served, the last one with files
|- SupportLost         a sample has no supports of its tokens, though they were requested
`- StartFailed         the engine could not be started with these settings
"""


class EngineError(Exception):
    """Base of all engine errors."""


class EngineDead(EngineError):
    """The engine process has exited or must not be used any more."""


class RequestRefused(EngineError):
    """The engine does not accept the parameters of a sample."""


class ConversationRefused(RequestRefused):
    """A field of a chat request is not accepted. `field` is its name in the OpenAI API."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class SamplingRefused(RequestRefused):
    """A sampling parameter is not accepted. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ChecksUnavailable(EngineError):
    """The process that checks structured outputs did not start; a later request may succeed."""


class QueueFull(EngineError):
    """Too much work of a kind waits: of one client, or of all clients."""

    def __init__(self, work: str, *, of_client: bool) -> None:
        whose = " of this API key" if of_client else ""
        super().__init__(f"too many bytes of {work}{whose} wait: repeat the request later")
        self.of_client = of_client


class NoTurnEnd(RequestRefused):
    """The end of an assistant's message cannot be found in the rendered chat."""


class PromptTooLong(RequestRefused):
    """The prompt rendered from a chat request is longer than the model's context."""


class CheckpointRefused(EngineError):
    """The weights do not fit the model. The message names the defect, never a path."""


class DrafterRefused(EngineError):
    """A drafter was refused: another one is under test, or one of this version exists."""


class MemoryUnavailable(EngineError):
    """The memory for a wake is not free on the device; the engine sleeps as before."""


class LoadFailed(EngineError):
    """Loading weights or an adapter failed after validation; what was served before still is."""


class FilesRestored(LoadFailed):
    """Loading failed, and the previous weights have no files, so those of `version` are served."""

    def __init__(self, version: str) -> None:
        super().__init__(
            f"loading failed, and the previous weights have no files; {version}, the last version "
            "with files, is served"
        )
        self.version = version


class SupportLost(EngineError):
    """The engine generated a sample without the supports of its tokens that were requested."""


class StartFailed(EngineError):
    """The engine could not be started with these settings."""
