"""Generators of the Helm chart's files. Not imported by the server."""
