"""verl plugin: VERL_USE_EXTERNAL_MODULES=coppice.verl.plugin imports it in every process.

With coppice-client installed the variable is not needed: the plugin is one of verl's entry points.
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
# verl has no public registry of BaseRollout classes.
base._ROLLOUT_REGISTRY[NAME, "async"] = "coppice.verl.hybrid_rollout.ServerAdapter"
