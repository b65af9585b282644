"""HTTP APIs of vLLM, SGLang and OpenAI for existing clients, mapped onto native rollouts.

These routes are not part of openapi.yaml. Their formats are taken from the clients named in
docs/migrate/index.md and are tested with the code of these clients.
"""
