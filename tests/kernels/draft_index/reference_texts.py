"""Reference implementation of texts and positions: lists, and a list of positions per context."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kernels.draft_index import store_protocol

Context = tuple[int, ...]


@dataclass(eq=False, slots=True, kw_only=True)
class Text:
    """A response, preceded by the end of its prompt, so that its first tokens have a context."""

    tokens: list[int]
    num_prompt_tokens: int = 0
    """Number of leading tokens that belong to the prompt."""
    group: int = 0
    version: int
    is_deleted: bool = False


@dataclass(eq=False, slots=True)
class PromptRecord:
    """All texts of one prompt. The first text is the prompt itself."""

    texts: list[Text]
    running: int = 0
    finished: list[Text] = field(default_factory=list)
    """Oldest first."""
    _places: dict[Context, list[tuple[Text, int]]] = field(default_factory=dict)

    @property
    def prompt(self) -> Text:
        return self.texts[0]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including those of deleted texts that still occupy space."""
        return sum(len(text.tokens) for text in self.texts)

    @property
    def num_charged_bytes(self) -> int:
        texts = (
            len(self.texts) * store_protocol.TEXT_BYTES
            + self.num_tokens * store_protocol.TOKEN_BYTES
        )
        return store_protocol.PROMPT_BYTES + texts

    def index(self, text: Text, begin: int) -> None:
        """Indexes the positions of its tokens from `begin` on."""
        for end in range(begin, len(text.tokens)):
            for order in store_protocol.ORDERS:
                if end >= order:
                    context = tuple(text.tokens[end - order : end])
                    self._places.setdefault(context, []).append((text, end))

    def find_matches(self, tokens: list[int], order: int) -> Iterator[tuple[Text, int]]:
        """Positions preceded by the same last `order` tokens, latest first."""
        found = self._places.get(tuple(tokens[-order:]), []) if len(tokens) >= order else []
        return reversed(found)

    def delete(self, text: Text) -> None:
        """Removes a text from lookups.

        Its space is reclaimed once half of the record is deleted.
        """
        text.is_deleted = True
        if 2 * sum(len(text.tokens) for text in self.texts if text.is_deleted) >= self.num_tokens:
            self.compact()

    def delete_finished(self) -> None:
        for text in self.finished:
            text.is_deleted = True
        self.finished.clear()
        self.compact()

    def compact(self) -> None:
        self.texts = [text for text in self.texts if not text.is_deleted]
        self._places.clear()
        for text in self.texts:
            self.index(text, text.num_prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedResponse:
    prompt: int
    version: int
    begin: int
    end: int


@dataclass(eq=False, slots=True)
class ResponseLog:
    """The latest finished responses to any prompt, each preceded by the end of its prompt."""

    capacity: int
    tokens: list[int] = field(default_factory=list)
    _places: dict[Context, list[tuple[int, LoggedResponse]]] = field(default_factory=dict)

    @property
    def tail(self) -> int:
        """The first position still stored."""
        return max(0, len(self.tokens) - self.capacity)

    def append(self, tokens: list[int], *, prompt: int, version: int) -> None:
        begin = len(self.tokens)
        text = LoggedResponse(prompt=prompt, version=version, begin=begin, end=begin + len(tokens))
        self.tokens += tokens
        for end in range(begin + store_protocol.ALL_ORDER, text.end):
            context = tuple(self.tokens[end - store_protocol.ALL_ORDER : end])
            self._places.setdefault(context, []).append((end, text))

    def find_matches(self, tokens: list[int]) -> Iterator[tuple[int, LoggedResponse]]:
        order = store_protocol.ALL_ORDER
        found = self._places.get(tuple(tokens[-order:]), []) if len(tokens) >= order else []
        return ((end, text) for end, text in reversed(found) if end - order >= self.tail)
