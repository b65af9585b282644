"""Random prompts of agents that receive each other's messages."""

import random

from coppice import PromptSpan

NUM_AGENTS, OWN, QUESTION, ASK = 5, 512, 128, 8


def num_prompt_tokens(said: int) -> int:
    return OWN + QUESTION + (NUM_AGENTS - 1) * said + ASK


class MultiAgentPrompts:
    """Draws random prompts for agents that receive each other's messages, round by round."""

    def __init__(self, seed: str, said: int, vocab_size: int) -> None:
        self._draw = random.Random(seed)
        self._said, self._vocab_size = said, vocab_size
        self.own = [self._text(OWN) for _ in range(NUM_AGENTS)]
        self._question = PromptSpan(token_ids=self._text(QUESTION), cache_key="question")

    def prompts(self) -> list[list[PromptSpan]]:
        """Draw the messages of the next round; returns the prompt of each agent."""
        said = [
            PromptSpan(token_ids=self._text(self._said), cache_key=f"agent-{i}")
            for i in range(NUM_AGENTS)
        ]
        return [
            [
                PromptSpan(token_ids=own),
                self._question,
                *(text for i, text in enumerate(said) if i != agent),
                PromptSpan(token_ids=self._text(ASK)),
            ]
            for agent, own in enumerate(self.own)
        ]

    def _text(self, length: int) -> list[int]:
        return [self._draw.randrange(3, self._vocab_size) for _ in range(length)]
