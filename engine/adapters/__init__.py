"""LoRA adapters: validation and loading into vLLM."""
