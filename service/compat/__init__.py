"""HTTP APIs of vLLM, SGLang, OpenAI and Anthropic for existing clients, mapped to native rollouts.

Each protocol has a folder; the modules beside the folders, and those of `chat`, serve several.
These routes are not part of openapi.yaml. Their formats are taken from the clients named in
docs/migrate/index.md and are tested with the code of these clients.
"""
