"""Generator of docs/reference/dependencies.md: packages of the lock files, versions, licences.

    .venv/bin/python scripts/dependencies.py

Licences of the CPU packages are from the metadata of installed packages, so it needs the
environment of `make serve`. Those of Ray, and of packages that only GPUs need, are kept from the
page. For new versions they are read from the wheels on the package index: only the metadata is
downloaded.
"""

import io
import json
import re
import urllib.request
import zipfile
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "reference" / "dependencies.md"
INDEX = "https://pypi.org/simple"
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
ROW = re.compile(r"^\| ([\w.-]+) \| (\S+) \| (.+) \|$", re.MULTILINE)
# Licences that require more of redistributors than to keep the licence text.
HAS_OBLIGATIONS = re.compile(r"GPL|MPL|Mozilla|EPL|Proprietary|NVIDIA|EULA", re.IGNORECASE)
HEAD = """# Dependencies

The packages that Coppice installs, with versions and licences. Read it before you redistribute an
image. `pyproject.toml` gives the purpose of each direct dependency. The lock files contain the
hashes of the packages, and installation verifies them.

Licences are quoted from the packages' metadata. A licence in bold asks for more than its text when
you redistribute the package. `scripts/dependencies.py` generates this page; `make lock` runs it.
"""
CPU = """
## On CPUs

`requirements/torch-cpu.txt` and `requirements/cpu.txt`.

| package | version | licence |
|---|---|---|
"""
GPU = """
## Only on GPUs

`requirements/gpu.txt`, without the packages that are listed above at the same version.

| package | version | licence |
|---|---|---|
"""
RAY = """
## With Ray

`requirements/ray.txt`, for `engine.distributed_executor_backend: ray`.

| package | version | licence |
|---|---|---|
"""


class RemoteFile(io.RawIOBase):
    """A file on an HTTP server of which only the parts that are read are downloaded."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._place = url, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {0: 0, 1: self._place, 2: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        end = min(self._place + len(buffer), self._size)
        if end <= self._place:
            return 0
        found = fetch(self._url, {"Range": f"bytes={self._place}-{end - 1}"})
        assert len(found) == end - self._place, "the package index does not support ranges"
        buffer[: len(found)] = found
        self._place = end
        return len(found)


def fetch(url: str, headers: dict[str, str]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return bytes(answer.read())


def pinned(*names: str) -> list[tuple[str, str]]:
    texts = [(ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8") for name in names]
    return sorted(pair for text in texts for pair in PINNED.findall(text))


def only_gpu() -> list[tuple[str, str]]:
    cpu = set(pinned("torch-cpu", "cpu"))
    return [pair for pair in pinned("gpu") if pair not in cpu]


def licence(found: Message) -> str:
    """The licence expression, or the classifiers, or the first words of the licence text."""
    classified = [
        value.rpartition(" :: ")[2]
        for value in found.get_all("Classifier", [])
        if value.startswith("License :: ") and value != "License :: OSI Approved"
    ]
    written = (found.get("License") or "").strip().splitlines()
    return found.get("License-Expression") or "; ".join(classified) or " ".join(written[:1])[:60]


def installed_licence(name: str) -> str:
    try:
        return licence(metadata(name))  # type: ignore[arg-type]
    except PackageNotFoundError:
        return "not installed on this platform"


def published_licence(name: str, version: str) -> str:
    listing = fetch(f"{INDEX}/{name}/", {"Accept": "application/vnd.pypi.simple.v1+json"})
    wheels = [
        file
        for file in json.loads(listing)["files"]
        if file["filename"].endswith(".whl") and file["filename"].split("-")[1] == version
    ]
    wheel = min(wheels, key=lambda file: "x86_64" not in file["filename"])
    return licence(metadata_of(RemoteFile(wheel["url"], wheel["size"])))


def metadata_of(wheel: io.RawIOBase) -> Message:
    with zipfile.ZipFile(io.BufferedReader(wheel)) as archive:
        [path] = [p for p in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", p)]
        return HeaderParser().parsestr(archive.read(path).decode())


def row(name: str, version: str, text: str) -> str:
    text = text or "not stated"
    return f"| {name} | {version} | {f'**{text}**' if HAS_OBLIGATIONS.search(text) else text} |\n"


def rendered(known: dict[tuple[str, str], str]) -> str:
    """The page. `known` has the licences that need not be looked up on the package index."""
    cpu = [(name, v, installed_licence(name)) for name, v in pinned("torch-cpu", "cpu")]
    gpu, ray = (
        [(n, v, known.get((n, v)) or published_licence(n, v)) for n, v in packages]
        for packages in (only_gpu(), pinned("ray"))
    )
    tables = ["".join(row(*cells) for cells in table) for table in (cpu, gpu, ray)]
    return HEAD + CPU + tables[0] + GPU + tables[1] + RAY + tables[2]


def listed() -> dict[tuple[str, str], str]:
    """Licences on the page of packages that are not installed here."""
    rows = ROW.findall(FILE.read_text(encoding="utf-8").partition(GPU)[2])
    return {(name, version): text.strip("*") for name, version, text in rows}


if __name__ == "__main__":
    FILE.write_text(rendered(listed()), encoding="utf-8")
