"""Compatibility APIs of other inference servers, mapped onto rollouts, weights and limits.

These routes are not part of openapi.yaml. Their formats are taken from the clients named in
docs/trainers.md and are tested with the code of these clients.
"""
