"""Chat and completion with OpenAI's client: `python -m examples.openai_client URL`."""

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Compute 12+34."}],
        temperature=0,
        max_tokens=64,
    )
    print(f"{chat.choices[0].finish_reason}: {chat.choices[0].message.content!r}")
    completion = client.completions.create(
        model=model,
        prompt="Compute 12+34.\n",
        n=4,
        max_tokens=64,
        logprobs=0,  # the sampled tokens only
        extra_body={"return_token_ids": True, "return_weight_versions": True},
    )
    for choice in completion.choices:
        extra = choice.model_extra or {}
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        versions = [span["version"] for span in extra["weight_versions"]]
        num_tokens, num_logprobs = len(extra["token_ids"]), len(choice.logprobs.token_logprobs)
        print(f"{num_tokens} tokens, {num_logprobs} logprobs, weights {versions}")


if __name__ == "__main__":
    main(sys.argv[1])
