"""Benchmark: throughput when drafting from sibling samples, against other drafters.

The baselines are no drafts, vLLM's ngram, Arctic's suffix decoding, every fixed draft length and an
oracle.

Each arm is an engine in its own process, with the environment of the server's EngineCore; arms
alternate over the workloads. `off` samples a workload's texts, and then all arms, `off` included,
generate the same tokens (`bench/harness/teacher_forced.py`). The seedling is grown to a target cost
per step; its responses do not change. `disabled` is the engine of `ours` with drafting switched off
for this run, so that both are compared in one process, and `disabled-again` the same once more.

A record is made in parts, of as many rounds as time permits. Rounds of other seeds (`--seed`) and
of other arms are added to the record. Arms are compared on rounds that they share.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.decode_timing import write_config
from bench.harness.record import Record, add_out
from bench.harness.replay_estimate import cells, predict_seconds
from bench.harness.speculation_arm import DISABLED, Workload, prompts
from bench.harness.speculation_results import Round, guard_rows, summarize_run, workload_rows
from bench.harness.speculation_workers import Arms, Run, Texts, arms

FIXED = ("fixed-1", "fixed-2", "fixed-4", "fixed-8")
ALL = ("off", "ours", "ngram", "suffix", *FIXED, "oracle")
GUARD, GUARD_TOKENS = ("off", "ours", DISABLED, f"{DISABLED}-again"), 32
CACHE = Path("build/speculation_profile")


def run_workloads(names: Sequence[str], arms: Arms, works: Sequence[Workload]) -> list[Round]:
    """Run all workloads with all arms; the first workload is the warm-up."""
    rounds, runs_of, texts_of = [], [], []
    for number, work in enumerate(works):
        drawn = arms.run("off" if "off" in names else DISABLED, work, None)
        order = names if number % 2 else names[::-1]
        runs = {name: arms.run(name, work, drawn["texts"]) for name in order}
        assert len({run["tokens"] for run in runs.values()}) == 1, "all say the same"
        runs_of.append(runs)
        texts_of.append(drawn["texts"])
        rounds.append(Round(seed=work.seed, surprise=drawn["surprise"], arms={}))
    _fill(rounds, runs_of, texts_of, works)
    return rounds[1:]


def _fill(
    rounds: Sequence[Round],
    runs_of: Sequence[dict[str, Run]],
    texts_of: Sequence[Texts],
    works: Sequence[Workload],
) -> None:
    """Add results to the rounds, with times predicted by a replay with measured step times."""
    steps = cells([run for runs in runs_of[1:] for run in runs.values()])
    asked = [prompts(work) for work in works]
    for name in runs_of[0]:
        seconds = predict_seconds(name, asked, texts_of, steps)
        for number, (one, runs) in enumerate(zip(rounds, runs_of, strict=True)):
            one.arms[name] = summarize_run(runs[name], seconds[number] if seconds else None)
    rounds[-1].steps.extend(steps)


def run_guard(names: Sequence[str], arms: Arms, works: Sequence[Workload]) -> list[Round]:
    """Run workloads with unpredictable texts, where speculation must not cost throughput.

    Responses have a fixed length, and each arm samples its own texts.
    """
    rounds = []
    for number, work in enumerate(works):
        order = names if number % 2 else names[::-1]
        runs = {name: arms.run(name, work, None) for name in order}
        made = {name: summarize_run(run, None) for name, run in runs.items()}
        rounds.append(Round(seed=work.seed, surprise=runs[names[0]]["surprise"], arms=made))
    return rounds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["workload", "guard"])
    parser.add_argument("model", type=Path, nargs="?", help="enlarged seedling")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    parser.add_argument("--arms", nargs="*", help="default: all of the part")
    parser.add_argument("--arctic", help="where arctic-inference is installed")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="directory of the step-time profile"
    )
    add_out(parser)
    options = parser.parse_args()
    is_guard = options.part == "guard"
    seeds = [10**6 + options.seed, *range(options.seed, options.seed + options.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder) / "model") if is_guard else options.model
        names = options.arms or list(GUARD if is_guard else ALL)
        assert is_guard or {"off", DISABLED} & {*names}, "one of these draws the texts"
        sampling: dict[str, Any] = {"temperature": options.temperature}
        if is_guard:
            sampling |= {"max_tokens": GUARD_TOKENS, "ignore_eos": True}
        works = [Workload(seed=seed, **sampling) for seed in seeds]
        with arms(names, model, cache=options.cache, arctic=options.arctic) as begun:
            rounds = (
                run_guard(names, begun, works) if is_guard else run_workloads(names, begun, works)
            )
    result = record(options.part, model.name, options.temperature, rounds, options.out)
    result.show()
    print(f"\nwrote {result.write(options.out).name}")


def record(
    part: str, model: str, temperature: float, new: Sequence[Round], directory: Path
) -> Record:
    name = "speculation_guard" if part == "guard" else f"speculation_{model}_{temperature:g}"
    name = name.replace(".", "_")
    rounds = Round.added(directory / f"{name}.json", new)
    if part == "guard":
        claim = "64 samples of a model of random weights, 25M parameters in bfloat16, whose "
        claim += "output cannot be predicted: adaptive speculation against no speculation."
        rows = guard_rows(rounds)
    else:
        claim = f"Eight groups of eight, up to 512 tokens, at temperature {temperature}; {model}, "
        claim += (
            "the bundled model enlarged, in bfloat16. All arms generate the same tokens "
            "(teacher-forced), sampled without drafts."
        )
        rows = workload_rows(rounds)
    raw = {"rounds": [one.summary() for one in rounds]}
    return Record(name=name, bench="speculation", claim=claim, rows=rows, raw=raw)


if __name__ == "__main__":
    main()
