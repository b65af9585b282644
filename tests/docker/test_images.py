"""The Dockerfiles and the compose file; `docker/build_without_docker.py` executes them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from docker.build_without_docker import instructions
from tests.monitoring.tools import promtool

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))

every_image = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def stages(file: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions(file.read_text()):
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


def last(file: Path, name: str) -> str:
    return [rest for instruction, rest in stages(file)[-1] if instruction == name][-1]


@every_image
def test_hadolint_finds_nothing(file: Path) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    assert hadolint is not None, "the dev lock has it"
    ran = subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")


@every_image
def test_signals_reach_the_server(file: Path) -> None:
    """The exec form: a shell in between would not forward SIGTERM."""
    assert json.loads(last(file, "ENTRYPOINT")) == ["/opt/coppice/bin/coppice"]
    assert json.loads(last(file, "CMD")) == ["serve"]


@every_image
def test_container_runs_unprivileged_with_one_writable_directory(file: Path) -> None:
    user, group = last(file, "USER").split(":")
    assert int(user) > 10000
    assert int(group) > 10000
    environment = dict(pair.split("=") for pair in last(file, "ENV").split())
    assert {environment[name] for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")} == {"/cache"}
    assert environment["HF_HUB_OFFLINE"] == "1"


@every_image
def test_health_check_probes_the_engine(file: Path) -> None:
    command = json.loads(last(file, "HEALTHCHECK").partition("CMD ")[2])
    assert "/livez" in command[-1]
    compile(command[-1], "health check", "exec")


@every_image
def test_locked_versions_are_installed(file: Path) -> None:
    builds, final = stages(file)
    commands = " ".join(rest for name, rest in builds if name == "RUN")
    device = file.name.partition(".")[0]
    assert f"--no-deps --require-hashes -r requirements/{device}.txt" in commands
    installs = re.findall(r"pip install (.*?)(?:&&|\|\||;|$)", commands)
    assert installs
    assert all("--no-deps" in install for install in installs)
    assert "pip install" not in " ".join(rest for name, rest in final if name == "RUN")


@every_image
def test_kernels_are_compiled_and_their_presence_checked(file: Path) -> None:
    """A wheel builds without them if the compiler fails."""
    builds, _ = stages(file)
    assert any("setup.py" in rest.split() for name, rest in builds if name == "COPY")
    commands = [rest for name, rest in builds if name == "RUN"]
    assert "g++" in commands[0].split()
    assert commands[-1].count("built()") == 2


def test_cpu_image_has_no_compiler() -> None:
    commands = " ".join(
        rest for name, rest in stages(DOCKER / "cpu.Dockerfile")[-1] if name == "RUN"
    )
    assert not re.search(r"gcc|g\+\+|clang|build-essential", commands)


def test_every_copied_file_is_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for file in FILES:
        for name, rest in stages(file)[0]:
            if name == "COPY":
                for source in rest.split()[:-1]:
                    assert f"!{source.split('/')[0]}" in ignored, source
                    assert (ROOT / source).exists()


def test_gpu_image_has_the_compilers_that_triton_and_inductor_call() -> None:
    final = [rest for name, rest in stages(DOCKER / "gpu.Dockerfile")[-1] if name == "RUN"]
    assert {"python3-dev", "g++", "libc6-dev"} <= set(" ".join(final).split())


def composed(name: str) -> dict[str, Any]:
    """The services of a compose file, those of other files included."""
    services: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())["services"]
    for key, service in services.items():
        if "extends" in service:
            extended = service["extends"]
            services[key] = composed(extended["file"])[extended["service"]]
    return services


@pytest.fixture(params=["compose.yaml", "gpu.yaml"])
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    return composed(request.param)


def with_defaults(text: str) -> str:
    """Text in which no variable is set, so that `${NAME:-default}` is the default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_every_file_mounted_by_compose_exists(services: dict[str, Any]) -> None:
    mounted = [
        with_defaults(volume).split(":")[0]
        for service in services.values()
        for volume in service["volumes"]
    ]
    files = [DOCKER / place for place in mounted if place.startswith(".")]
    assert len(files) >= 4
    assert all(file.exists() for file in files)


def test_compose_serves_localhost_and_confines_the_server(
    services: dict[str, Any],
) -> None:
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert not service["image"].endswith(":latest")
    server = services["coppice"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["shm_size"]
    drain = int(server["environment"]["COPPICE_SERVER__DRAIN_SECONDS"])
    assert int(server["stop_grace_period"].removesuffix("s")) >= drain + 20


def test_compose_for_gpus_serves_the_bundled_model_unless_told_otherwise() -> None:
    server = composed("gpu.yaml")["coppice"]
    assert server["build"]["dockerfile"] == "docker/gpu.Dockerfile"
    [device] = server["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", "all")
    source, target, mode = with_defaults(server["volumes"][-1]).split(":")
    model = with_defaults(server["environment"]["COPPICE_ENGINE__MODEL"])
    assert (target, mode) == ("/models", "ro")
    assert (DOCKER / source / model.removeprefix("/models/") / "config.json").exists()


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    """As mounted, with the rules next to it."""
    shutil.copy(DOCKER / "prometheus.yaml", tmp_path / "prometheus.yml")
    shutil.copytree(ROOT / "helm" / "coppice" / "monitoring", tmp_path / "rules")
    checked = promtool("check", "config", tmp_path / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
