"""Hooks in vLLM's samplers: sampling supports, logprobs, controls, routed experts."""
