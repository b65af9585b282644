"""Greedy samples of plain vLLM for chats with images, without any hook of this project.

python -m tests.engine.plain_vision MODEL < chats.json > samples.json
"""

import json
import sys

from tests.engine.plain_vllm import sample_of


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    chats = json.load(sys.stdin)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=2**26,
        max_num_seqs=8,
        logprobs_mode="processed_logprobs",
    )
    outputs = llm.chat(chats, params, use_tqdm=False)
    found = [{**sample_of(each), "prompt_token_ids": each.prompt_token_ids} for each in outputs]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
