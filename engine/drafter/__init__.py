"""A small model that drafts, and learns while the large one serves.

In the workers vLLM runs it (`draft_model`); in EngineCore `drafting.py` decides how much it drafts
and counts what becomes of it; beside the service `drafter.py` owns its versions, their trials, and
the process that trains it.
"""
