"""vLLM configuration of the KV connector."""

from typing import Final

CONNECTOR: Final = {
    "kv_connector": "PromptKvConnector",
    "kv_connector_module_path": "engine.kv_transfer.connector",
    "kv_role": "kv_producer",  # loads of a consumer may outlast a step; ours never do
    "kv_load_failure_policy": "recompute",
}
