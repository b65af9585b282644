"""Programs for tests/compat: released third-party clients against a server at an address.

Each runs in a process of its own with .clients on its path, and prints one JSON object.
"""
