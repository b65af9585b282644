"""Names under which the engine keeps KV across weights updates, per rollout or session."""

import uuid
from typing import Final

from coppice.wire.columns.kv_version_spans import KeepKv
from engine.types.samples import KeptKv

_NAMESPACE: Final = uuid.uuid4().hex
"""Prefix of the salts of chains, so that no caller's `cache_salt` equals one."""


def rollout_chain(owner: str, keep: KeepKv, name: str) -> KeptKv:
    """Chain of the rollouts of one API key under one name, or under the id of the first one."""
    return _chain(f"{len(owner)}:{owner}:{name}", keep)


def session_chain(cache_salt: str, keep: KeepKv | None) -> KeptKv | None:
    """Chain of the calls that share the cache salt of a session."""
    return None if keep is None else _chain(cache_salt, keep)


def _chain(name: str, keep: KeepKv) -> KeptKv:
    return KeptKv(chain=f"{_NAMESPACE}:{name}", max_lag=keep.max_lag)
