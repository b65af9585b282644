"""Root model of all settings of the server, and its sections without a module of their own.

service/config/sources.py loads them. No other part of the server reads the environment.
"""

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic.fields import FieldInfo

from coppice.wire.base import Label
from engine.attention.settings import AttentionSettings
from engine.cudagraphs.settings import GraphsSettings
from engine.settings import EngineSettings, default_cache_directory
from engine.settings.base import (
    Count,
    Port,
    PositiveInt,
    Seconds,
    Section,
)
from engine.speculation.settings import SpeculationSettings
from service.config.allowed_peers import parse_allowed
from service.config.cluster import ClusterSettings
from service.config.limits import LimitsSettings
from service.config.prompt_kv import KvSettings
from service.config.sessions import SessionsSettings

HTTP_URL = r"^https?://[^/?#@\s]+(/[^?#\s]*)?$"


def _split(value: object) -> object:
    return [part for part in value.split(":") if part] if isinstance(value, str) else value


def _split_words(value: object) -> object:
    return value.split() if isinstance(value, str) else value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


CompatApi = Literal["vllm", "sglang", "openai", "anthropic"]
Host = Annotated[str, Field(min_length=1)]
Words = Annotated[tuple[str, ...], BeforeValidator(_split_words)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_split)]
AtLeast1024 = Annotated[int, Field(ge=1024)]


class ServerSettings(Section):
    """Addresses, access and shutdown of the HTTP server."""

    host: Host = Field(
        "127.0.0.1",
        description="address to listen on; 0.0.0.0: all IPv4 interfaces; set it to serve other "
        "machines",
    )
    port: Port = Field(
        8000,
        description="TCP port to listen on; 0: any free port; change it if another process uses "
        "the port",
    )
    allow_open: bool = Field(
        False,
        description="allows addresses other than loopback without API keys; set it only on a "
        "trusted network",
    )
    keys_file: Path | None = Field(
        None,
        description="YAML file with the accepted API keys, reloaded when it changes; none: no key "
        "is required; set it if other machines can reach the server",
    )
    operators_host: Host = Field(
        "127.0.0.1",
        description="address to listen on for server.operators_port; change it if operators use "
        "other machines",
    )
    operators_port: Port | None = Field(
        None,
        description="separate TCP port for /metrics and the routes of the role admin; none: they "
        "are served on server.port; set it to separate operators from callers",
    )
    advertised_url: str | None = Field(
        None,
        pattern=HTTP_URL,
        description="URL at which clients reach this replica directly, not through a load "
        "balancer; required if replicas share a cluster registry",
    )
    allowed_hosts: Words = Field(
        (),
        description="host names that a server without API keys accepts in the Host header, "
        "separated by spaces, such as `coppice *.example.org`; IP addresses, localhost and its "
        "own name are always accepted; *: any name; set it if clients use another name",
    )
    ui: bool = Field(
        False,
        description="serves a read-only dashboard at /ui, for keys with the role watch; enable it "
        "to watch rollouts in a browser",
    )
    drain_seconds: Count = Field(
        30,
        description="time that running requests may take at shutdown, in seconds; increase it for "
        "long rollouts",
    )
    stop_seconds: Seconds = Field(
        30,
        description="time from the end of the drain to the exit of the process, in seconds; the "
        "engine is killed and the process exits when it has passed; reduce it to stop sooner "
        "while the engine hangs",
    )
    compat: Annotated[tuple[CompatApi, ...], BeforeValidator(_split)] = Field(
        ("vllm", "sglang", "openai", "anthropic"),
        description="APIs of other servers that are served in addition to the native one, "
        "separated by ':'; reduce it to the APIs that clients use",
    )

    @model_validator(mode="after")
    def _refuse_open(self) -> Self:
        hosts = [self.host] if self.operators_port is None else [self.host, self.operators_host]
        reachable = [host for host in hosts if not _is_loopback(host)]
        if reachable and not (self.allow_open or self.keys_file):
            raise ValueError(
                f"host {reachable[0]} can be reached from other machines and there are no API "
                "keys; set server.keys_file, or set server.allow_open to true to serve without "
                "keys"
            )
        return self


class WeightsSettings(Section):
    """Sources, storage and replication of weights versions."""

    directory: Path = Field(
        default_factory=lambda: default_cache_directory() / "weights",
        description="directory that uploads are stored in; needs room for "
        "weights.retain_superseded + 3 versions; change it if the default has too little room, or "
        "to a directory on tmpfs for trainers on the same host",
    )
    source_directories: Paths = Field(
        (),
        description="directories from which POST /v1/weights may load versions by path, separated "
        "by ':'; none: uploads only; set it if trainer and server share a file system",
    )
    max_upload_bytes: PositiveInt = Field(
        64 * 2**30,
        description="maximum size of one uploaded file, in bytes; increase it for larger files, "
        "or upload shards",
    )
    retain_superseded: Count = Field(
        2,
        description="number of superseded versions whose files are kept for a rollback; reduce it "
        "to save disk space",
    )
    peers: Words = Field(
        (),
        description="URLs from which other replicas' weights may be fetched, separated by spaces, "
        "such as http://10.0.0.0/8:8000 or http://*.replicas:8000; none: weights are not fetched "
        "from replicas; set it if replicas share a cluster registry",
    )
    peer_key_file: Path | None = Field(
        None,
        description="file with the API key, of the role replica, that is sent to other replicas; "
        "needed if they require keys",
    )
    replication_seconds: Seconds = Field(
        300.0,
        description="timeout of an activation on all replicas, and time for which a new replica "
        "tries to fetch the target version of the cluster before it serves its own version, in "
        "seconds; increase it if replicas fetch large versions slowly",
    )
    initial_version: Label = Field(
        "v0",
        description="version name of the initial weights; change it to the trainer's name for "
        "these weights",
    )

    @model_validator(mode="after")
    def _refuse_odd_peers(self) -> Self:
        for peer in self.peers:
            parse_allowed(peer)
        return self


class LogSettings(Section):
    """Format and level of logs. Prompts and responses are never logged."""

    format: Literal["human", "json"] = Field(
        "human",
        description="log format; human: readable lines; json: one object per line; set it to json "
        "for log collectors",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="minimum level that is logged; debug: includes vLLM's own log; set it to "
        "debug to investigate the engine",
    )


class TraceSettings(Section):
    """Destination of trace spans."""

    endpoint: str | None = Field(
        None,
        pattern=HTTP_URL,
        description="OTLP/HTTP URL to which trace spans are exported, such as "
        "http://collector:4318/v1/traces; none: no traces; set it to export traces",
    )


class Settings(Section):
    """All settings of the server, by section. Without arguments all fields have their defaults."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    attention: AttentionSettings = Field(default_factory=AttentionSettings)
    speculation: SpeculationSettings = Field(default_factory=SpeculationSettings)
    graphs: GraphsSettings = GraphsSettings()
    weights: WeightsSettings = Field(default_factory=WeightsSettings)
    limits: LimitsSettings = LimitsSettings()
    kv: KvSettings = KvSettings()
    sessions: SessionsSettings = SessionsSettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()
    trace: TraceSettings = TraceSettings()

    @model_validator(mode="after")
    def _refuse_nowhere(self) -> Self:
        if self.cluster.redis_url is not None and self.server.advertised_url is None:
            raise ValueError(
                "cluster.redis_url requires server.advertised_url, for redirects between replicas"
            )
        if self.engine.weight_transfer is not None and self.cluster.redis_url is not None:
            raise ValueError(
                "engine.weight_transfer and cluster.redis_url exclude each other: other replicas "
                "cannot fetch weights that have no files"
            )
        if self.engine.has_random_weights and (named := self._needs_weights()):
            raise ValueError(
                f"engine.load_format dummy and {named} exclude each other: random weights are no "
                "version of the model"
            )
        return self

    def _needs_weights(self) -> str | None:
        """The first setting that has no meaning with random weights."""
        set_ones = {
            "cluster.redis_url": self.cluster.redis_url is not None,
            "engine.weight_transfer": self.engine.weight_transfer is not None,
            "engine.max_adapters": self.engine.max_adapters > 0,
            "speculation.mode drafter": self.speculation.mode == "drafter",
        }
        return next((name for name, is_set in set_ones.items() if is_set), None)


def settings_fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yields the section, name and pydantic field of every setting."""
    for section, info in Settings.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel), section
        for name, field in model.model_fields.items():
            yield section, name, field


def redacted(settings: BaseModel) -> dict[str, Any]:
    """The settings as plain values for printing; secrets are masked with asterisks."""
    return settings.model_dump(mode="json")


def changed_settings(settings: BaseModel) -> dict[str, Any]:
    """The settings that differ from their defaults, as `redacted` prints them."""
    return settings.model_dump(mode="json", exclude_defaults=True)
