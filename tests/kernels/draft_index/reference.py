"""Reference implementation of the draft store, which the compiled one must equal exactly."""

from collections import OrderedDict

import numpy as np

from kernels.draft_index import store_protocol
from kernels.draft_index.store_protocol import (
    ALL_SCOPES,
    DraftBatch,
    Int32Array,
    InvalidCall,
    Reliability,
    Scope,
    check_begin,
    check_step,
    hash_key,
)
from tests.kernels.draft_index.acceptance_reference import AcceptanceEstimate, cell
from tests.kernels.draft_index.reference_rows import PendingDraft, Row
from tests.kernels.draft_index.reference_texts import PromptRecord, ResponseLog, Text
from tests.kernels.draft_index.reference_votes import (
    MAX_MATCH_LENGTH,
    DraftedToken,
    MatchFinder,
    vote_tokens,
)


class ReferenceStore:
    """See `Store` for the semantics of each call."""

    def __init__(
        self, *, max_bytes: int, max_draft_tokens: int = 16, scopes: frozenset[Scope] = ALL_SCOPES
    ) -> None:
        assert 1 <= max_draft_tokens <= store_protocol.MAX_DRAFT_TOKENS
        self._max_bytes, self._max_draft_tokens, self._scopes = max_bytes, max_draft_tokens, scopes
        self._version = 0
        self._records: OrderedDict[int, PromptRecord] = OrderedDict()  # least recently used first
        self._rows: dict[int, Row] = {}
        self._free: list[int] = []
        self._log = ResponseLog(store_protocol.log_tokens(max_bytes))
        self._estimate = AcceptanceEstimate()

    @property
    def num_bytes(self) -> int:
        fixed = self._log.capacity * store_protocol.LOG_TOKEN_BYTES
        return fixed + sum(record.num_charged_bytes for record in self._records.values())

    @property
    def num_tokens(self) -> int:
        return sum(record.num_tokens for record in self._records.values())

    def begin(self, group: bytes, prompt: Int32Array) -> int:
        check_begin(prompt)
        key = hash_key(prompt.tobytes())
        record = self._records.get(key) or self._new_record(key, prompt.tolist())
        if len(record.texts) == store_protocol.MAX_TEXTS:
            record.compact()
        if len(record.texts) == store_protocol.MAX_TEXTS:
            raise InvalidCall(store_protocol.TOO_MANY_TEXTS)
        tail = record.prompt.tokens[-MAX_MATCH_LENGTH:]
        text = Text(
            tokens=list(tail),
            num_prompt_tokens=len(tail),
            group=hash_key(group),
            version=self._version,
        )
        record.texts.append(text)
        record.running += 1
        record.prompt.version = self._version
        self._records.move_to_end(key)
        slot = self._free.pop() if self._free else len(self._rows)
        self._rows[slot] = Row(prompt=key, record=record, text=text)
        self._evict_over_budget()
        return slot

    def end(self, slot: int, *, keep: bool) -> None:
        row = self._rows.pop(slot, None)
        if row is None:
            raise InvalidCall(f"slot {slot} is not in use")
        self._free.append(slot)
        record, text = row.record, row.text
        record.running -= 1
        self._records.move_to_end(row.prompt)
        if not keep or len(text.tokens) == text.num_prompt_tokens:
            record.delete(text)
            return
        logged = text.tokens[max(0, text.num_prompt_tokens - store_protocol.ALL_ORDER) :]
        self._log.append(logged, prompt=row.prompt, version=text.version)
        record.finished.append(text)
        if len(record.finished) > store_protocol.MAX_FINISHED_TEXTS:
            record.delete(record.finished.pop(0))

    def age(self) -> None:
        self._version += 1

    def step(
        self, slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
    ) -> DraftBatch:
        check_step(slots, counts, tokens, limits)
        rows = [self._rows.get(int(slot)) for slot in slots]
        self._check(slots, counts, rows)
        begin = 0
        for row, count in zip(rows, counts.tolist(), strict=True):
            assert row is not None
            row.append(tokens[begin : begin + count].tolist(), self._version, self._estimate)
            begin += count
        drafted = DraftBatch.empty(len(rows), self._max_draft_tokens)
        for index, (row, limit) in enumerate(zip(rows, limits.tolist(), strict=True)):
            assert row is not None
            self._draft(row, min(limit, self._max_draft_tokens), drafted, index)
        self._evict_over_budget()
        return drafted

    def reliability(self) -> Reliability:
        return self._estimate.reliability

    def _new_record(self, key: int, prompt: list[int]) -> PromptRecord:
        record = PromptRecord([Text(tokens=prompt, version=self._version)])
        record.index(record.prompt, 0)
        self._records[key] = record
        return record

    def _check(self, slots: Int32Array, counts: Int32Array, rows: list[Row | None]) -> None:
        for slot, count, row in zip(slots.tolist(), counts.tolist(), rows, strict=True):
            if row is None:
                raise InvalidCall(f"slot {slot} is not in use")
            if len(row.text.tokens) + count >= store_protocol.MAX_TEXT_TOKENS:
                raise InvalidCall(
                    f"slot {slot} has more than {store_protocol.MAX_TEXT_TOKENS} tokens"
                )
        if len(set(slots.tolist())) < len(slots):
            raise InvalidCall("a slot occurs twice in the step")

    def _draft(self, row: Row, limit: int, drafted: DraftBatch, index: int) -> None:
        finder = MatchFinder(
            record=row.record,
            text=row.text,
            log=self._log,
            prompt=row.prompt,
            version=self._version,
            scopes=self._scopes,
        )
        if not limit:
            return
        best_token = list(vote_tokens(finder.find_matches(), limit))
        cells = [
            cell(one.scope, one.match_length, one.num_agreeing, one.total, position)
            for position, one in enumerate(best_token)
        ]
        chances = [self._estimate.probability(cell) for cell in cells]
        row.set_pending(PendingDraft([one.token for one in best_token], cells, chances))
        drafted.lengths[index] = len(best_token)
        for position, (one, chance) in enumerate(zip(best_token, chances, strict=True)):
            _write(drafted, (index, position), one, chance)

    def _evict_over_budget(self) -> None:
        """Evicts prompts without running requests first, then finished responses of the others."""
        while self.num_bytes > self._max_bytes:
            idle = (key for key, record in self._records.items() if not record.running)
            busy = (record for record in self._records.values() if record.finished)
            if (key := next(idle, None)) is not None:
                del self._records[key]
            elif (record := next(busy, None)) is not None:
                record.delete_finished()
            else:
                return


def _write(drafted: DraftBatch, at: tuple[int, int], one: DraftedToken, chance: np.float32) -> None:
    drafted.tokens[at] = one.token
    drafted.scope[at] = one.scope
    drafted.match_length[at] = one.match_length
    drafted.num_agreeing[at], drafted.total[at] = one.num_agreeing, one.total
    drafted.probability[at] = chance
