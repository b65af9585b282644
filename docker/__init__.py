"""Images, and the proof that they work without Docker."""
