"""Builds and starts an image without Docker: runs its Dockerfile's steps in a chroot, as root.

    debootstrap --variant=minbase bookworm /tmp/base
    python docker/build_without_docker.py docker/cpu.Dockerfile --base /tmp/base --work /tmp/proof

Every instruction of the file is executed, so the file itself is tested. The image is started as its
metadata say: as its own user, with a read-only root, no network but loopback, and only /cache and
/dev/shm writable. Not tested are layers, the base image that the file names, and a container
runtime's own restrictions.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CHROOT_SCRIPT = """
set -e
mount --bind {root} {root}
mount -t proc none {root}/proc
mount --bind /sys {root}/sys && mount -o remount,ro,bind {root}/sys
for device in null zero random urandom; do
    touch {root}/dev/$device && mount --bind /dev/$device {root}/dev/$device
done
mkdir -p {root}/dev/shm && mount -t tmpfs -o mode=1777 none {root}/dev/shm
"""

PROBE_SCRIPT = """
import json, os, shutil, socket, sys, time, urllib.error, urllib.request as r
url = "http://127.0.0.1:8000"
for name in ("gcc", "g++", "cc", "c++", "clang", "pip"):
    assert not shutil.which(name), name
assert os.getuid() == 10001
for place in ("/probe", "/opt/coppice/probe", "/tmp/probe"):
    try:
        open(place, "w")
    except OSError:
        continue
    raise AssertionError(place)
began = time.monotonic()
while True:
    try:
        r.urlopen(url + "/readyz")
        break
    except OSError:
        assert time.monotonic() - began < 900
        time.sleep(0.2)
print(f"ready after {time.monotonic() - began:.1f} s")
group = {"prompt": {"text": "Compute 12+34.\\n"}, "n": 4}
body = json.dumps({"groups": [group], "sampling": {"max_tokens": 32}}).encode()
head = {"Content-Type": "application/json"}
from kernels.draft_index import compiled_store
from kernels.shared_prefix_attention import cpu
assert compiled_store.is_built() and cpu.is_built(), "compiled kernels are missing"
answer = json.load(r.urlopen(r.Request(url + "/v1/rollouts", body, head)))
assert r.urlopen(url + "/openapi.yaml").read().startswith(b"openapi:")
print("outcome", answer["outcome"], [len(s["token_ids"]) for s in answer["groups"][0]["samples"]])
assert answer["outcome"] == "done"
"""


@dataclass
class Stage:
    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": SYSTEM_PATH})
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    kept = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    for line in "\n".join(kept).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name, rest.strip()


class Builder:
    """Interpreter of a Dockerfile. `binds` are host directories with its package sources."""

    def __init__(self, base: Path, work: Path, binds: list[str]) -> None:
        self._base, self._work, self._binds = base, work, binds
        self._stages: dict[str, Stage] = {}
        self._now: Stage | None = None

    def build(self, dockerfile: Path) -> Stage:
        for name, rest in instructions(dockerfile.read_text()):
            print(f"{name} {rest[:100]}", flush=True)
            getattr(self, f"_{name.lower()}")(rest)
        assert self._now is not None
        return self._now

    @property
    def now(self) -> Stage:
        assert self._now is not None, "FROM comes first"
        return self._now

    def _arg(self, rest: str) -> None:
        """Handle ARG. The base image is replaced by the one on the command line."""

    _expose = _arg

    def _from(self, rest: str) -> None:
        name = rest.partition(" AS ")[2] or "final"
        root = self._work / name
        subprocess.run(["rm", "-rf", root], check=True)
        subprocess.run(["cp", "-a", self._base, root], check=True)
        (root / "etc" / "resolv.conf").write_text(Path("/etc/resolv.conf").read_text())
        self._now = self._stages[name] = Stage(root)

    def _run(self, rest: str) -> None:
        run(self.now, ["/bin/sh", "-c", rest], binds=self._binds, env=_pip_package_sources())

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        origin = ROOT
        if sources[0].startswith("--from="):
            origin = self._stages[sources.pop(0).removeprefix("--from=")].root
        place = self.now.root / (Path(self.now.workdir) / target).as_posix().lstrip("/")
        for source in sources:
            path = origin / source.lstrip("/")
            inside = target.endswith("/") or len(sources) > 1
            place.mkdir(parents=True, exist_ok=True) if inside or path.is_dir() else None
            copied = f"{path}/." if path.is_dir() else path
            subprocess.run(["cp", "-a", "--no-preserve=ownership", copied, place], check=True)

    def _env(self, rest: str) -> None:
        self.now.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))

    def _user(self, rest: str) -> None:
        self.now.user = rest

    def _workdir(self, rest: str) -> None:
        self.now.workdir = rest
        (self.now.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _entrypoint(self, rest: str) -> None:
        self.now.entrypoint = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.now.command = json.loads(rest)

    def _healthcheck(self, rest: str) -> None:
        self.now.health = json.loads(rest.partition("CMD ")[2])


def _pip_package_sources() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def _chroot(stage: Stage, command: list[str], env: dict[str, str]) -> str:
    variables = [f"{name}={value}" for name, value in (stage.env | env).items()]
    inside = ["env", "-C", stage.workdir, "-i", *variables, *command]
    return shlex.join(["chroot", f"--userspec={stage.user}", str(stage.root), *inside])


def run(stage: Stage, command: list[str], *, binds: list[str], env: dict[str, str]) -> None:
    script = CHROOT_SCRIPT.format(root=stage.root)
    for bind in binds:
        script += f"mkdir -p {stage.root}{bind} && mount --bind {bind} {stage.root}{bind}\n"
    script += "exec " + _chroot(stage, command, env)
    subprocess.run(["unshare", "-m", "-p", "-f", "sh", "-c", script], check=True)


def start(stage: Stage) -> None:
    """Start the server as process 1, probe it, then send SIGTERM."""
    uid, gid = stage.user.split(":")
    probe = ["/opt/coppice/bin/python", "-c", PROBE_SCRIPT]
    server = _chroot(
        stage, stage.entrypoint + stage.command, {"COPPICE_SERVER__ALLOW_OPEN": "true"}
    )
    script = (
        CHROOT_SCRIPT.format(root=stage.root)
        + f"""
ip link set lo up
mount -o remount,ro,bind {stage.root}
mount -t tmpfs -o mode=0700,uid={uid},gid={gid} none {stage.root}/cache
{server} & server=$!
{_chroot(stage, probe, {})}
{_chroot(stage, stage.health, {})} && echo healthy
ls -A {stage.root}/cache
kill -TERM $server
wait $server && echo "SIGTERM: exit status 0"
"""
    )
    subprocess.run(["unshare", "-m", "-n", "-p", "-f", "sh", "-c", script], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument(
        "--base", type=Path, required=True, help="root file system of the base image"
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="directory for the root file systems of the stages"
    )
    parser.add_argument(
        "--bind", action="append", default=[], help="host directory that is mounted for RUN steps"
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("build_without_docker: chroot requires root")
    options.work.mkdir(parents=True, exist_ok=True)
    stage = Builder(options.base, options.work, options.bind).build(options.dockerfile)
    size = subprocess.run(["du", "-sh", stage.root], capture_output=True, text=True, check=True)
    print(f"size {size.stdout.split()[0]}")
    start(stage)


if __name__ == "__main__":
    main()
