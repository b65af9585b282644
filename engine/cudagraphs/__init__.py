"""The CUDA graphs that are captured at a start, planned within a budget of bytes. No torch here."""
