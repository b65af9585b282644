"""Draft lookup in EngineCore, for Model Runner V2 (GPU)."""
