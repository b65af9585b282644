"""HTTP APIs of vLLM, SGLang, OpenAI and Anthropic for existing clients, run as native rollouts.

vLLM's own serving classes answer the APIs in `serving`. These routes are not part of openapi.yaml.
"""
