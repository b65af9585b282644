"""The settings tree: validated once at the start, immutable, logged with secrets masked.

Sources by precedence: flags, COPPICE_<SECTION>__<FIELD> environment variables, a YAML file,
defaults. No other part of the server reads the environment.
"""

import difflib
import ipaddress
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from coppice.wire.base import Label
from engine.settings import (
    AttentionSettings,
    EngineSettings,
    GraphsSettings,
    SpeculationSettings,
    cache_directory,
)
from service.cluster.settings import DirectorySettings
from service.config.sources import (
    SettingsError,
    Source,
    from_environment,
    from_file,
    from_flags,
    merge,
)
from service.prompt_kv.settings import KvSettings
from service.weights.replication.peers import parse_allowed

CompatApi = Literal["vllm", "sglang", "openai"]


def _split(value: object) -> object:
    return [part for part in value.split(":") if part] if isinstance(value, str) else value


def _split_words(value: object) -> object:
    return value.split() if isinstance(value, str) else value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Section(BaseModel):
    """Base class of the sections of the settings tree."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(Section):
    """Addresses, access and shutdown of the HTTP server."""

    host: Annotated[str, Field(min_length=1, description="address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="TCP port to listen on; 0: any free one")
    ] = 8000
    allow_open: Annotated[
        bool, Field(description="true: listen on other addresses than loopback, without keys")
    ] = False
    keys_file: Annotated[
        Path | None,
        Field(description="YAML file with the keys that are taken; none: no key is asked for"),
    ] = None
    operators_host: Annotated[
        str, Field(min_length=1, description="address to listen on for operators")
    ] = "127.0.0.1"
    operators_port: Annotated[
        int | None,
        Field(
            ge=0,
            le=65535,
            description="TCP port for /metrics and the routes of the role admin, which are then "
            "on no other; none: they are on server.port",
        ),
    ] = None
    advertised_url: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$",
            description="address at which clients reach this very replica, whatever stands in "
            "front; needed where replicas share a directory",
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        BeforeValidator(_split_words),
        Field(
            description="names, in Host, that a server without keys answers to besides loopback, "
            "IP addresses and its own, separated by spaces: coppice *.example.org; *: any"
        ),
    ] = ()
    ui: Annotated[
        bool, Field(description="true: a page at /ui that watches, for keys with the role watch")
    ] = False
    drain_seconds: Annotated[
        int, Field(ge=0, description="seconds that running requests may take to end at a stop")
    ] = 30
    compat: Annotated[
        tuple[CompatApi, ...],
        BeforeValidator(_split),
        Field(description="other servers' clients that are understood as well, separated by ':'"),
    ] = ("vllm", "sglang", "openai")

    @model_validator(mode="after")
    def _refuse_open(self) -> Self:
        hosts = [self.host] if self.operators_port is None else [self.host, self.operators_host]
        reachable = [host for host in hosts if not _is_loopback(host)]
        if reachable and not (self.allow_open or self.keys_file):
            raise ValueError(
                f"host {reachable[0]} can be reached from other machines and the server has no "
                "keys; "
                "name server.keys_file, or set server.allow_open to true to serve there without"
            )
        return self


class WeightsSettings(Section):
    """Sources, storage and replication of weights versions."""

    directory: Path = Field(
        default_factory=lambda: cache_directory("weights"),
        description="directory that uploads are staged in",
    )
    source_directories: Annotated[
        tuple[Path, ...],
        BeforeValidator(_split),
        Field(description="directories that POST /v1/weights may name paths in, separated by ':'"),
    ] = ()
    max_upload_bytes: Annotated[
        int, Field(ge=1, description="bytes of one uploaded file at most")
    ] = 64 * 2**30
    retain_superseded: Annotated[
        int, Field(ge=0, description="superseded versions whose files are kept, for going back")
    ] = 2
    peers: Annotated[
        tuple[str, ...],
        BeforeValidator(_split_words),
        Field(
            description="addresses that other replicas may be read from, separated by spaces, such "
            "as http://10.0.0.0/8:8000 or http://*.replicas:8000; none: nothing is read from them"
        ),
    ] = ()
    peer_key_file: Annotated[
        Path | None,
        Field(description="file with the key, of the role replica, that is shown to them"),
    ] = None
    fleet_seconds: Annotated[
        float, Field(gt=0, description="seconds that an activation waits for other replicas")
    ] = 120.0
    catch_up_seconds: Annotated[
        float,
        Field(ge=0, description="seconds that a new replica tries to get what the others serve"),
    ] = 300.0
    initial_version: Annotated[
        Label, Field(description="version that the weights loaded at the start are called")
    ] = "v0"

    @model_validator(mode="after")
    def _refuse_odd_peers(self) -> Self:
        for peer in self.peers:
            parse_allowed(peer)
        return self


class LimitsSettings(Section):
    """Limits of requests, connections and running work."""

    max_body_bytes: Annotated[
        int, Field(ge=1024, description="bytes of a request's body at most, uploads apart")
    ] = 32 * 2**20
    max_json_values: Annotated[
        int, Field(ge=1024, description="values that the JSON of a request may hold")
    ] = 4 * 2**20
    max_json_containers: Annotated[
        int, Field(ge=1024, description="objects and arrays among these values")
    ] = 512 * 2**10
    max_samples_per_request: Annotated[
        int, Field(ge=1, description="samples of all groups of one request at most")
    ] = 65536
    keep_answers_seconds: Annotated[
        float, Field(gt=0, description="seconds that an ended rollout can still be asked for")
    ] = 600.0
    keep_answers_bytes: Annotated[
        int, Field(ge=0, description="bytes of ended rollouts that are kept at most")
    ] = 2**30
    max_samples_per_key: Annotated[
        int | None, Field(ge=1, description="samples that one key may have running; none: no bound")
    ] = None
    max_prompt_tokens_per_key: Annotated[
        int | None,
        Field(ge=1, description="prompt tokens that one key may have running; none: no bound"),
    ] = None
    max_samples_running: Annotated[
        int, Field(ge=1, description="samples that the server accepts before earlier ones end")
    ] = 131_072
    max_overtaken_seconds: Annotated[
        float,
        Field(gt=0, description="seconds in which later groups may overtake one by their priority"),
    ] = 60.0
    max_tree_lease_seconds: Annotated[
        float, Field(gt=0, description="seconds that an open tree may wait for its owner")
    ] = 600.0
    max_header_bytes: Annotated[
        int, Field(ge=1024, description="bytes of a request's address and headers at most")
    ] = 64 * 2**10
    read_seconds: Annotated[
        float, Field(gt=0, description="seconds that a head, or 16 KiB of a body, may take to come")
    ] = 30.0
    write_seconds: Annotated[
        float, Field(gt=0, description="seconds that a reader may take for 256 KiB of an answer")
    ] = 60.0
    max_connections: Annotated[
        int,
        Field(ge=1, description="open connections of a port at most; fewer where files are few"),
    ] = 16384
    keep_alive_seconds: Annotated[
        int, Field(ge=1, description="seconds that an idle connection is kept open")
    ] = 75


class LogSettings(Section):
    """Format and level of logs. Prompts and responses are never logged."""

    format: Annotated[
        Literal["human", "json"], Field(description="human: lines to read; json: an object a line")
    ] = "human"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(description="least level that is logged"),
    ] = "info"


class TraceSettings(Section):
    """Destination and sampling of trace spans."""

    endpoint: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$",
            description="OTLP/HTTP address that spans are sent to, such as "
            "http://collector:4318/v1/traces; none: nowhere",
        ),
    ] = None
    sample_ratio: Annotated[
        float,
        Field(ge=0, le=1, description="share of traces begun here; a caller's choice is kept"),
    ] = 1.0


class Settings(Section):
    """The whole settings tree. Without arguments all fields have their defaults."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    attention: AttentionSettings = Field(default_factory=AttentionSettings)
    speculation: SpeculationSettings = Field(default_factory=SpeculationSettings)
    graphs: GraphsSettings = GraphsSettings()
    weights: WeightsSettings = Field(default_factory=WeightsSettings)
    limits: LimitsSettings = LimitsSettings()
    kv: KvSettings = KvSettings()
    directory: DirectorySettings = DirectorySettings()
    log: LogSettings = LogSettings()
    trace: TraceSettings = TraceSettings()

    @model_validator(mode="after")
    def _refuse_nowhere(self) -> Self:
        if self.directory.redis_url is not None and self.server.advertised_url is None:
            raise ValueError("directory.redis_url needs server.advertised_url, for the others")
        return self


def settings_fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """All fields of the tree, as section, name and field."""
    for section, info in Settings.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel), section
        for name, field in model.model_fields.items():
            yield section, name, field


def redacted(settings: BaseModel) -> dict[str, Any]:
    """The settings as plain values for printing; secrets are masked with asterisks."""
    return settings.model_dump(mode="json")


def load_settings(
    *,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Load and validate the settings; raises SettingsError.

    `flags`: values by dotted path (`engine.block_size`).
    """
    sources = [
        from_flags(flags or {}),
        from_environment(os.environ if environ is None else environ),
    ]
    if file is not None:
        sources.append(from_file(file))
    try:
        return Settings.model_validate(merge(sources))
    except ValidationError as error:
        raise SettingsError(*(_error_line(detail, sources) for detail in error.errors())) from None


def _error_line(detail: ErrorDetails, sources: Sequence[Source]) -> str:
    """Error message in one line. Never includes the value, which may be a secret."""
    path = [str(part) for part in detail["loc"]]
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        text = "there is no such setting" + _suggestion(path)
    origin = _origin(path, sources)
    return f"{'.'.join(path)}: {text}" + (f" (from {origin})" if origin else "")


def _suggestion(path: Sequence[str]) -> str:
    known = [f"{section}.{name}" for section, name, _ in settings_fields()]
    close = difflib.get_close_matches(".".join(path), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _origin(path: Sequence[str], sources: Sequence[Source]) -> str | None:
    """Name that the setting has in its source: a flag, a variable or a file.

    None for a known section as a whole, because several sources may contribute to it.
    """
    section, *rest = path
    if rest:
        names = (source.name_of(section, rest[0]) for source in sources)
    else:
        names = (
            source.name_of_section(section)
            for source in sources
            if _is_sole_source(section, source)
        )
    return next(filter(None, names), None)


def _is_sole_source(section: str, source: Source) -> bool:
    """True if this source alone caused the error of the section."""
    return section not in Settings.model_fields or not isinstance(source.values.get(section), dict)
