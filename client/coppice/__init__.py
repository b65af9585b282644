"""The trainer's side of Coppice."""

from coppice.client import AsyncRollouts, Pending, Rollouts
from coppice.core.pending import AsyncPending
from coppice.credit import (
    effective_leaves,
    segment_advantages,
    segment_rewards,
    segment_weights,
)
from coppice.errors import (
    ActivationFailed,
    BadAnswer,
    ConnectionFailed,
    CoppiceError,
    Draining,
    EngineUnavailable,
    Forbidden,
    GatewayFailed,
    IdempotencyMismatch,
    InvalidRequest,
    KvLost,
    KvUnavailable,
    NotFound,
    Overloaded,
    ProblemError,
    QuotaExceeded,
    RequestInProgress,
    RequestTimeout,
    RolloutLost,
    ServerFailed,
    StreamBroken,
    TimedOut,
    TransportError,
    TreeClosed,
    Unauthorized,
    VersionConflict,
    VersionSuperseded,
    VersionUnavailable,
    WeightsRefused,
)
from coppice.kv.prompt_kv import PromptKV
from coppice.kv.source import KvSource
from coppice.plot import plot_tree
from coppice.prompts import PromptLike
from coppice.pruning import pruned_by_depth, pruned_by_width
from coppice.results import Group, RolloutResult
from coppice.retry import Retry
from coppice.samples import Sample
from coppice.scores import Score
from coppice.tree import Segment, Tree
from coppice.wire.branching import Branching, BranchRequest, Entropy
from coppice.wire.control import PauseAnswer, StatusAnswer
from coppice.wire.kv import Kv, KvHandle, KvLayout, KvLocator
from coppice.wire.problems import Problem
from coppice.wire.records import (
    EndRecord,
    GroupRecord,
    KvRecord,
    ProgressRecord,
    Record,
    SampleRecord,
    SegmentRecord,
    StartRecord,
)
from coppice.wire.rollouts import Finish, GroupRequest, Message, Policy, Prompt, Usage, VersionSpan
from coppice.wire.score import ScoreItem
from coppice.wire.weights import ActivationAnswer, VersionAnswer, VersionsAnswer

__all__ = [
    "ActivationAnswer",
    "ActivationFailed",
    "AsyncPending",
    "AsyncRollouts",
    "BadAnswer",
    "BranchRequest",
    "Branching",
    "ConnectionFailed",
    "CoppiceError",
    "Draining",
    "EndRecord",
    "EngineUnavailable",
    "Entropy",
    "Finish",
    "Forbidden",
    "GatewayFailed",
    "Group",
    "GroupRecord",
    "GroupRequest",
    "IdempotencyMismatch",
    "InvalidRequest",
    "Kv",
    "KvHandle",
    "KvLayout",
    "KvLocator",
    "KvLost",
    "KvRecord",
    "KvSource",
    "KvUnavailable",
    "Message",
    "NotFound",
    "Overloaded",
    "PauseAnswer",
    "Pending",
    "Policy",
    "Problem",
    "ProblemError",
    "ProgressRecord",
    "Prompt",
    "PromptKV",
    "PromptLike",
    "QuotaExceeded",
    "Record",
    "RequestInProgress",
    "RequestTimeout",
    "Retry",
    "RolloutLost",
    "RolloutResult",
    "Rollouts",
    "Sample",
    "SampleRecord",
    "Score",
    "ScoreItem",
    "Segment",
    "SegmentRecord",
    "ServerFailed",
    "StartRecord",
    "StatusAnswer",
    "StreamBroken",
    "TimedOut",
    "TransportError",
    "Tree",
    "TreeClosed",
    "Unauthorized",
    "Usage",
    "VersionAnswer",
    "VersionConflict",
    "VersionSpan",
    "VersionSuperseded",
    "VersionUnavailable",
    "VersionsAnswer",
    "WeightsRefused",
    "effective_leaves",
    "plot_tree",
    "pruned_by_depth",
    "pruned_by_width",
    "segment_advantages",
    "segment_rewards",
    "segment_weights",
]
