"""Settings section `directory`."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator


class DirectorySettings(BaseModel):
    """Cluster registry settings. A single server needs none of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    redis_url: Annotated[
        str | None,
        Field(
            pattern=r"^rediss?://",
            description="Redis 7.0 or later that replicas share, such as redis://host:6379/0, or "
            "rediss:// for TLS; none: this server is alone",
        ),
    ] = None
    redis_user: Annotated[
        str | None, Field(min_length=1, description="user of Redis's ACL; none: its default user")
    ] = None
    redis_password: Annotated[
        SecretStr | None,
        Field(min_length=1, description="password of that user; better in redis_password_file"),
    ] = None
    redis_password_file: Annotated[
        Path | None, Field(description="file with that password, read at every connection")
    ] = None
    tls_ca_file: Annotated[
        Path | None,
        Field(description="certificates that sign Redis's own; none: those the system trusts"),
    ] = None
    key_prefix: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9_.-]{1,64}$",
            description="what every key in Redis begins with; one for each fleet",
        ),
    ] = "coppice"
    call_seconds: Annotated[
        float, Field(gt=0, description="seconds that Redis may take for an answer")
    ] = 0.5
    heartbeat_seconds: Annotated[
        float, Field(gt=0, description="seconds between two signs of life of a replica")
    ] = 3.0
    expire_seconds: Annotated[
        float, Field(gt=0, description="seconds after which a silent replica counts as gone")
    ] = 15.0
    claim_seconds: Annotated[
        int, Field(ge=60, description="seconds that Redis remembers an idempotency key at most")
    ] = 86_400

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        # The Redis client accepts a password, or disabled certificate checks, in the URL's query.
        if self.redis_url is not None and set("?#@") & set(self.redis_url):
            raise ValueError(
                "redis_url has no options, and credentials go into redis_user and "
                "redis_password_file"
            )
        if self.redis_password is not None and self.redis_password_file is not None:
            raise ValueError("redis_password or redis_password_file, not both")
        if self.expire_seconds < 2 * self.heartbeat_seconds + self.call_seconds:
            raise ValueError("expire_seconds must cover two heartbeats and a call")
        return self
