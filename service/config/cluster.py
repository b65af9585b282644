"""Settings section `cluster`: Redis address and credentials, heartbeats, timeouts."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from engine.settings.base import Seconds, SecondsOrZero, Section


class ClusterSettings(Section):
    """Cluster registry settings. A single server needs none of them."""

    redis_url: str | None = Field(
        None,
        pattern=r"^rediss?://",
        description="URL of the Redis server (7.0 or later) that holds the cluster registry, such "
        "as redis://host:6379/0, or rediss:// for TLS; none: this server runs alone; set it if "
        "several replicas serve the same callers",
    )
    redis_user: str | None = Field(
        None,
        min_length=1,
        description="Redis ACL user; none: the default user; set it if the Redis server has ACL "
        "users",
    )
    redis_password_file: Path | None = Field(
        None,
        description="file with the password of the Redis user, read at each connection; set it if "
        "the Redis server requires a password",
    )
    tls_ca_file: Path | None = Field(
        None,
        description="CA certificates that verify the Redis server's certificate; none: those of "
        "the system; set it for a private certificate authority",
    )
    key_prefix: str = Field(
        "coppice",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="prefix of all keys in Redis; different for each cluster that shares the "
        "Redis server; change it if clusters share a Redis server",
    )
    call_seconds: Seconds = Field(
        0.5,
        description="timeout of a call to Redis, in seconds; increase it on a slow network",
    )
    heartbeat_seconds: Seconds = Field(
        3.0,
        description="interval between the heartbeats of a replica, in seconds; reduce it to "
        "detect failed replicas sooner",
    )
    expire_seconds: Seconds = Field(
        15.0,
        description="time without a heartbeat after which a replica counts as gone, in seconds; "
        "at least two heartbeat intervals and a call; increase it if live replicas count as gone",
    )
    handoff_seconds: SecondsOrZero = Field(
        1.5,
        description="time in which a draining replica hands its rollouts to the other replicas, in "
        "seconds; needs weights.peers; 0: it runs them to their end; increase it for many tokens "
        "or a slow network",
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        # The Redis client accepts a password, or disabled certificate checks, in the URL's query.
        if self.redis_url is not None and set("?#@") & set(self.redis_url):
            raise ValueError(
                "redis_url must not contain options or credentials; set redis_user and "
                "redis_password_file"
            )
        if self.expire_seconds < 2 * self.heartbeat_seconds + self.call_seconds:
            raise ValueError("expire_seconds must cover two heartbeat intervals and a call")
        return self
