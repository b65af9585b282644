"""Ids of replicas, rollouts and prompt-KV handles. The latter two start with the replica's id.

Any replica can therefore find the owner of an id without a lookup, and ids can be returned to
clients without being registered anywhere.
"""

import re
import secrets
import uuid

_NAME = re.compile(r"^(?P<replica>[0-9a-f]{12})\.[0-9A-Za-z_-]{1,64}$")


def new_replica_id() -> str:
    """Id of one server process. A restart is a new replica, as no state survives it."""
    return secrets.token_hex(6)


def new_rollout_id(replica_id: str) -> str:
    return f"{replica_id}.{uuid.uuid4().hex}"


def new_handle_id(replica_id: str) -> str:
    """Unguessable id of a prompt-KV handle."""
    return f"{replica_id}.{secrets.token_urlsafe(18)}"


def replica_id_of(name: str) -> str | None:
    """Replica that created the id; None if the id is malformed."""
    found = _NAME.match(name)
    return None if found is None else found["replica"]
