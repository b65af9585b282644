"""GRPO with TRL's own trainer; the samples come from a Coppice server."""
