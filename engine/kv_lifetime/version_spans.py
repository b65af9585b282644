"""Weights versions of the KV behind each token of a sample, collected in the service's process.

EngineCore reports to a request which of its KV is older than the weights, whenever that changes:
when it finds KV of its chain, after an update of the weights, and after its KV was computed again.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from engine.kv_lifetime.keep_option import KV_VERSIONS, OlderKv
from engine.types.samples import KvVersionSpan, VersionSpan

Reports = Sequence[tuple[int, OlderKv]]
"""Reports of a request, each with the index of the first token generated after it."""
_REPORTS = "coppice_kv_reports"


@functools.cache
def install() -> None:
    """Make vLLM's frontend pass the reports of a request to its output."""
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    OutputProcessor.process_outputs = _recording(OutputProcessor.process_outputs)
    RequestState.make_request_output = _with_reports(RequestState.make_request_output)


def reports_of(output: Any) -> Reports:
    found: Reports = output.__dict__.get(_REPORTS, ())
    return found


def kv_version_spans(
    reports: Reports, versions: Sequence[VersionSpan], num_prompt_tokens: int
) -> tuple[KvVersionSpan, ...]:
    """Versions of the KV of a sample's context and tokens, except for the last token.

    The KV of a sample without reports was computed under the version of its first token.
    """
    if not versions:
        return ()
    num_tokens = versions[-1].end
    readings = list(reports) if reports and reports[0][0] == 0 else [(0, []), *reports]
    ends = [*(first for first, _ in readings[1:]), num_tokens]
    found: list[KvVersionSpan] = []
    for (first, older), end in zip(readings, ends, strict=True):
        if first < end:
            num_positions = num_prompt_tokens + end - 1
            spans = _spans(first, older, _version_at(versions, first), num_positions)
            found = _joined(found, spans)
    return tuple(found)


def cut_kv_versions(
    spans: Sequence[KvVersionSpan], num_prompt_tokens: int, num_tokens: int
) -> tuple[KvVersionSpan, ...]:
    """The spans of a sample of which only the first tokens remain."""
    last = num_prompt_tokens + num_tokens - 1
    return tuple(
        replace(span, end=min(span.end, last))
        for span in spans
        if span.first_token < num_tokens and span.start < last
    )


def _spans(first: int, older: OlderKv, version: str, num_positions: int) -> list[KvVersionSpan]:
    return list(_runs(first, [*older, (version, num_positions)], num_positions))


def _runs(first: int, versions: OlderKv, num_positions: int) -> Iterator[KvVersionSpan]:
    start, names = 0, [version for version, _ in versions]
    for index, (version, end) in enumerate(versions):
        if names[index + 1 : index + 2] != [version] and start < min(end, num_positions):
            end = min(end, num_positions)
            yield KvVersionSpan(version=version, start=start, end=end, first_token=first)
            start = end


def _joined(known: list[KvVersionSpan], new: list[KvVersionSpan]) -> list[KvVersionSpan]:
    """Both readings of the KV, or the new one if the positions of the known one are the same."""
    if not known or not new:
        return known + new
    first = known[-1].first_token
    last = [span for span in known if span.first_token == first]
    moved = [replace(span, first_token=first) for span in new]
    end = last[-1].end
    same = [replace(span, end=min(span.end, end)) for span in moved if span.start < end] == last
    return known[: len(known) - len(last)] + moved if same else known + new


def _version_at(versions: Sequence[VersionSpan], index: int) -> str:
    return next(span.version for span in versions if span.start <= index < span.end)


def _recording(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def process_outputs(
        self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        for index, output in enumerate(engine_core_outputs):
            if output.kv_transfer_params and KV_VERSIONS in output.kv_transfer_params:
                before = engine_core_outputs[:index]
                new = sum(len(e.new_token_ids) for e in before if e.request_id == output.request_id)
                _record(self.request_states.get(output.request_id), output, num_new=new)
        return upstream(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _record(state: Any, output: Any, *, num_new: int) -> None:
    """Record a report after the request's tokens until now, and new ones of the same message."""
    if state is None or state.detokenizer is None:
        return
    older = [(version, end) for version, end in output.kv_transfer_params[KV_VERSIONS]]
    reports = state.__dict__.setdefault(_REPORTS, [])
    reports.append((state.detokenizer.num_output_tokens() + num_new, older))


def _with_reports(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def make_request_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = upstream(self, *args, **kwargs)
        if output is not None and _REPORTS in self.__dict__:
            output.__dict__[_REPORTS] = self.__dict__[_REPORTS]
        return output

    return make_request_output
