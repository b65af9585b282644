"""The process that trains a drafter on what was served: `python -m engine.drafter.trainer`.

It is told samples, a line of JSON each, on its standard input, and tells what it has made on its
standard output. It ends when its input does.
"""
