"""Names of rollouts and of prompt KV handles. Each begins with the replica that it was given by.

So any replica knows where a name belongs without asking anybody, and nothing has to be written
anywhere before the name can be handed out.
"""

import re
import secrets
import uuid

_NAME = re.compile(r"^(?P<replica>[0-9a-f]{12})\.[0-9A-Za-z_-]{1,64}$")


def new_replica_id() -> str:
    """Of one process: after a restart it is another replica, which has nothing of the first."""
    return secrets.token_hex(6)


def new_rollout_id(replica_id: str) -> str:
    return f"{replica_id}.{uuid.uuid4().hex}"


def new_handle_id(replica_id: str) -> str:
    """Nobody can guess it."""
    return f"{replica_id}.{secrets.token_urlsafe(18)}"


def replica_id_of(name: str) -> str | None:
    """None: no replica has given such a name."""
    found = _NAME.match(name)
    return None if found is None else found["replica"]
