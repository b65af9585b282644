"""GRPO example that shows learning in minutes on two CPU cores: `make demo`."""
