"""A GRPO loop that learns on two cores in minutes: `make demo`."""
