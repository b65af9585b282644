"""Agent with a calculator. It knows the base URL and the key of its session, and nothing else."""

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from examples.agent.calculator import call_calculator

MAX_CALLS = 12


async def solve(client: AsyncOpenAI, question: str) -> str:
    """Returns the policy's answer. A response that ends in `17*24=` calls the calculator."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        text = completion.choices[0].message.content or ""
        result = call_calculator(text.rpartition("\n")[2])
        if result is None:
            return text
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "tool", "tool_call_id": "calculator", "content": result.strip()})
    return ""
