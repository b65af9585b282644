"""Measurements of bench.trainer_step: a grid of group shapes, and ways to run a step."""
