"""Hooks in vLLM's sampler and model runners: supports, logprobs, controls, routed experts."""
