"""Integration with verl: rollouts by a Coppice server, weights over HTTP.

Ray reserves no GPU for rollouts, and no NCCL is used for weights. `plugin` registers the rollout
`coppice` and the checkpoint engine `coppice` with verl. `generation` and `publisher` do not need
verl.
"""
