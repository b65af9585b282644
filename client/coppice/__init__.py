"""The trainer's side of Coppice."""

from coppice.client import AsyncRollouts, Rollouts
from coppice.errors import (
    ActivationFailed,
    BadAnswer,
    ConnectionFailed,
    CoppiceError,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    ProblemError,
    ServerFailed,
    StreamBroken,
    TimedOut,
    TransportError,
    VersionConflict,
    VersionSuperseded,
    VersionUnavailable,
    WeightsRefused,
)
from coppice.prompts import PromptLike
from coppice.results import Group, RolloutResult, Sample
from coppice.wire.control import PauseAnswer, StatusAnswer
from coppice.wire.problems import Problem
from coppice.wire.records import (
    EndRecord,
    GroupRecord,
    ProgressRecord,
    Record,
    SampleRecord,
    StartRecord,
)
from coppice.wire.rollouts import GroupRequest, Message, Policy, Prompt, Usage, VersionSpan
from coppice.wire.weights import ActivationAnswer, VersionAnswer, VersionsAnswer

__all__ = [
    "ActivationAnswer",
    "ActivationFailed",
    "AsyncRollouts",
    "BadAnswer",
    "ConnectionFailed",
    "CoppiceError",
    "EndRecord",
    "EngineUnavailable",
    "Group",
    "GroupRecord",
    "GroupRequest",
    "InvalidRequest",
    "Message",
    "NotFound",
    "PauseAnswer",
    "Policy",
    "Problem",
    "ProblemError",
    "ProgressRecord",
    "Prompt",
    "PromptLike",
    "Record",
    "RolloutResult",
    "Rollouts",
    "Sample",
    "SampleRecord",
    "ServerFailed",
    "StartRecord",
    "StatusAnswer",
    "StreamBroken",
    "TimedOut",
    "TransportError",
    "Usage",
    "VersionAnswer",
    "VersionConflict",
    "VersionSpan",
    "VersionSuperseded",
    "VersionUnavailable",
    "VersionsAnswer",
    "WeightsRefused",
]
