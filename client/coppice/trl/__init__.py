"""Integration with TRL: rollouts by a Coppice server, weights over HTTP without NCCL or a GPU.

`rollout_func` is for GRPOTrainer's argument of that name. `install` replaces the client of TRL's
server mode. trl must be installed; `install` also needs vllm.
"""

from coppice.trl.rollout import RolloutFunc, rollout_func
from coppice.trl.server_mode import install

__all__ = ["RolloutFunc", "install", "rollout_func"]
