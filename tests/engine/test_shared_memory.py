"""The sweep removes what nobody holds, and nothing else."""

import mmap
from pathlib import Path

from engine.shared_memory import sweep


def test_leftovers_are_removed_and_strangers_stay(tmp_path: Path) -> None:
    for name in ("psm_1", "vllm_dist_x-cpushm_0", "sem.mp-a", "somebody_elses"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    assert sweep(tmp_path) == ["psm_1", "sem.mp-a", "vllm_dist_x-cpushm_0"]
    assert [file.name for file in tmp_path.iterdir()] == ["somebody_elses"]


def test_what_a_living_process_holds_open_or_maps_stays(tmp_path: Path) -> None:
    for name in ("psm_open", "psm_mapped"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with (tmp_path / "psm_open").open("rb"):
        with (tmp_path / "psm_mapped").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert sweep(tmp_path) == []
        mapped.close()
    assert sweep(tmp_path) == ["psm_mapped", "psm_open"]


def test_a_machine_without_shared_memory_has_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep(tmp_path / "missing") == []
