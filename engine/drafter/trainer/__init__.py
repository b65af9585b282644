"""Training process of the draft model: `python -m engine.drafter.trainer`.

It reads messages as JSON lines from standard input and writes its own to standard output. It ends
when its input does.
"""
