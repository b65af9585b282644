"""Builder of the source distributions and wheels of server and client, in dist/.

    .venv/bin/python scripts/wheels.py [--out dist]

Two builds of the same commit on the same system and compiler are equal byte by byte: only files
that git knows are packed, with the time of the commit. Each wheel is built from its source
distribution, so a build fails if a file is missing there.
"""

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "client", ROOT)
BACKEND = "import sys, setuptools.build_meta as b; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"


def build(out: Path) -> list[Path]:
    """Build everything into `out`, and return the files."""
    out.mkdir(parents=True, exist_ok=True)
    return [file for source in SOURCES for file in build_one(source, out)]


def build_one(source: Path, out: Path) -> list[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree, unpacked = Path(folder, "tree"), Path(folder, "unpacked")
        copy(source, tree)
        sdist = normalized(run_backend("sdist", tree), out)
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        [root] = unpacked.iterdir()
        return [sdist, Path(shutil.copy(run_backend("wheel", root), out))]


def copy(source: Path, tree: Path) -> None:
    """Copy the files that git knows, with links resolved and modes independent of the umask."""
    listed = git("ls-files", "-z", cwd=source).split("\0")
    for name in filter(None, listed):
        if (source / name).is_file():
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
            target.chmod(0o755 if os.access(source / name, os.X_OK) else 0o644)


def run_backend(kind: str, tree: Path) -> Path:
    out = tree / f"built-{kind}"
    out.mkdir()
    environment = os.environ | {"SOURCE_DATE_EPOCH": commit_time()}
    command = [sys.executable, "-c", BACKEND, kind, str(out)]
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stdout + ran.stderr)
    [built] = out.iterdir()
    return built


def normalized(sdist: Path, out: Path) -> Path:
    """A copy of a source distribution without owners and with the time of the commit."""
    target = out / sdist.name
    with (
        tarfile.open(sdist) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=int(commit_time()), fileobj=file) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda found: found.name):
            content = old.extractfile(member) if member.isfile() else None
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = int(commit_time())
            member.pax_headers = {}
            new.addfile(member, content)
    return target


def commit_time() -> str:
    return os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct")


def git(*arguments: str, cwd: Path = ROOT) -> str:
    ran = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"wheels are built from a git clone: {ran.stderr.strip()}")
    return ran.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    for file in build(parser.parse_args().out):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")


if __name__ == "__main__":
    main()
