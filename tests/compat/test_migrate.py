"""The pages of docs/migrate name flags, settings and routes that exist."""

import dataclasses
import re

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from engine.launch.vllm_argument_checks import COVERED, OWNED
from service.compat.app import ROUTERS
from service.config.settings import CompatApi, Settings, settings_fields
from tests.compat.programs import ROOT, install

PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "migrate").glob("*.md")}
SETTINGS = {f"{section}.{name}" for section, name, _ in settings_fields()}
ENGINE_ARGUMENTS = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
VLLM_ARGS = {f"engine.vllm_args.{name}" for name in ENGINE_ARGUMENTS - {*COVERED, *OWNED}}
# Flags of `vllm serve` that are of its command line only.
COMMAND_FLAGS = {"config"}


def cells(page: str, column: int) -> str:
    """One column of all tables of flags of a page."""
    rows = re.findall(r"^\| .* \|$", PAGES[page], re.MULTILINE)
    flags = [row for row in rows if row.startswith("| `--") or "`--model" in row.split("|")[1]]
    return "\n".join(row.split("|")[column] for row in flags)


def names(text: str) -> set[str]:
    return {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", text)}


def test_flags_of_vllm_serve_exist() -> None:
    frontend = {field.name for field in dataclasses.fields(FrontendArgs)}
    known = {*ENGINE_ARGUMENTS, *frontend, *COMMAND_FLAGS}
    assert names(cells("vllm-serve", 1)) - known == set()
    assert len(names(cells("vllm-serve", 1))) > 50


@pytest.mark.slow
def test_flags_of_trl_vllm_serve_are_complete() -> None:
    install("clients")
    source = (ROOT / ".clients" / "trl" / "scripts" / "vllm_serve.py").read_text()
    flags = set(re.findall(r"^    (\w+): .* = field\($", source, re.MULTILINE))
    added = {"weight_transfer_config", "logprobs_mode", "max_logprobs", "enable_scale_out"}
    assert names(cells("trl-vllm-serve", 1)) == flags | added


@pytest.mark.parametrize("page", sorted(PAGES))
def test_settings_exist(page: str) -> None:
    sections = "|".join(Settings.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.[\w.]+)`", PAGES[page]))
    assert named - SETTINGS - VLLM_ARGS == set()


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_every_route_is_named(api: CompatApi) -> None:
    page = PAGES["vllm-serve" if api == "vllm" else "sglang"] + PAGES["vllm-serve"]
    paths = {getattr(route, "path", "") for router in ROUTERS[api] for route in router.routes}
    told = set(re.findall(r"`(?:GET |POST )?(/[^`?]+)`", page))
    assert {
        re.sub(r"\{(\w+):path\}", r"{\1}", path).replace("rest", "path") for path in paths
    } <= told


def test_pages_are_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in sorted(PAGES) if f"migrate/{page}.md" not in navigation] == []
