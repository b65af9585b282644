"""What clients of other servers speak, mapped onto the same rollouts, weights and limits.

Nothing here is part of openapi.yaml. Shapes are taken from the clients named in docs/trainers.md,
and tested with their own code.
"""
