"""verl's trainers on a Coppice server: no GPU is asked of Ray for rollouts, no NCCL for weights.

`coppice.verl.plugin` makes verl know the rollout `coppice` and the checkpoint engine `coppice`. The
other modules are what they are made of; `generation`, `params` and `publisher` need no verl.
"""
