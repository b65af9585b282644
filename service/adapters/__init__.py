"""LoRA adapters over the served weights: where they come from, which are loaded, who runs under
them."""
