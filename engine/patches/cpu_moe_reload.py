"""Patch for weights updates of mixture-of-experts models on CPU: weights are packed again.

vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:191 in 0.32.0, since
https://github.com/vllm-project/vllm/pull/40390; a similar defect on GPUs:
https://github.com/vllm-project/vllm/issues/42821

The CPU kernel reads expert weights in a packed layout. vLLM packs them when the kernel is made, but
not when weights are loaded into a model whose kernel exists. The kernel then reads unpacked values
as packed ones, without an error. Here they are packed after every load.
"""

import functools
from typing import Any


@functools.cache
def install() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    upstream = UnquantizedFusedMoEMethod._setup_kernel

    @functools.wraps(upstream)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_weight_update = self.moe_kernel is not None
        upstream(self, layer=layer, w13=w13, w2=w2)
        if is_weight_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel
