"""What bench.trainer_step measures: cells of a grid, and ways to take a step in each."""
