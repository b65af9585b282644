"""Sibling drafts in EngineCore, for Model Runner V2."""
