"""To be imported into every process of verl: VERL_USE_EXTERNAL_MODULES=coppice.verl.plugin.

An installed coppice-client needs no variable: it is one of verl's entry points.
"""

from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from coppice.verl.checkpoint import HttpCheckpointEngine

NAME = "coppice"


def _replica() -> type:
    from coppice.verl.replica import CoppiceReplica

    return CoppiceReplica


RolloutReplicaRegistry.register(NAME, _replica)
CheckpointEngineRegistry.register(NAME)(HttpCheckpointEngine)
# verl has no other way to name a BaseRollout.
base._ROLLOUT_REGISTRY[NAME, "async"] = "coppice.verl.adapter.ServerAdapter"
