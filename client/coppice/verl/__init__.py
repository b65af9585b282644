"""Integration with verl: rollouts by a Coppice server, weights over HTTP.

Ray reserves no GPU for rollouts, and no NCCL is used for weights. `coppice.verl.plugin` registers
the rollout `coppice` and the checkpoint engine `coppice` with verl. The modules `generation`,
`sampling_options` and `publisher` do not need verl.
"""
