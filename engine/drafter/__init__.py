"""Draft model for speculative decoding, trained online on served samples.

vLLM runs it in the workers (`draft_model`); on a GPU with the passes of `worker/`. In EngineCore,
`core/` chooses draft lengths and counts acceptance. In the service process, `service/` owns its
versions, their A/B tests and the trainer process (`trainer/`).
"""
