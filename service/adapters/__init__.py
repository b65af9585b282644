"""LoRA adapters: upload, versions loaded in the engine, and their use counts."""
