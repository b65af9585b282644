"""How vLLM is told which connector to load."""

from typing import Final

CONNECTOR: Final = {
    "kv_connector": "PromptKvConnector",
    "kv_connector_module_path": "engine.kv_transfer.connector",
    "kv_role": "kv_producer",  # a consumer's loads may outlive a step; ours never do
    "kv_load_failure_policy": "recompute",
}
