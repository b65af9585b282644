"""Measurements of bench.trainer_step: the grid's cells and the arms of a step."""
