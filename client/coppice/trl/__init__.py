"""TRL's trainers on a Coppice server, weights over HTTP: no NCCL, and no GPU needed.

`rollout_func` is for GRPOTrainer's documented argument of that name; `install` puts a client of
ours where TRL's server mode makes its own. Needs trl, and `install` vllm as well.
"""

from coppice.trl.rollout import RolloutFunc, rollout_func
from coppice.trl.server_mode import install

__all__ = ["RolloutFunc", "install", "rollout_func"]
