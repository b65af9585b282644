"""A GRPO loop in one file: rollout, reward, gradient, publication of the new weights."""
