"""GRPO with verl's own trainer; the samples come from Coppice servers."""
