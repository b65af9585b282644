"""Programs for tests/compat: other people's clients, as released, against a server at an address.

Each runs in a process of its own that sees .clients, and prints one JSON object.
"""
