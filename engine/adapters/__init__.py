"""LoRA adapters: what may be served, and what vLLM is told of it."""
