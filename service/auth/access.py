"""What every route asks of its caller. Deny by default: a route that declares nothing is refused.

The declaration is on the endpoint itself, and the dependency that enforces it is the whole app's.
Addresses are never looked at: vLLM did, and a hostile Host header led around it (CVE-2026-48746).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from service.auth.credentials import key_from_headers
from service.auth.keyring import LOCAL_KEY, Keyring
from service.auth.keys import ApiKey, Role
from service.http.cross_site import AllowedHosts, check_site
from service.http.errors import Forbidden, Unauthorized
from service.observability.logs import key_name

log = logging.getLogger(__name__)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_ACCESS_ATTRIBUTE = "coppice_access"
ANONYMOUS = ApiKey(name="nobody", roles=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`role`: which of its roles a key needs; none: any key will do. `page`: other sites may link
    to it."""

    public: bool = False
    page: bool = False
    role: Role | None = None


def public(endpoint: Endpoint) -> Endpoint:
    """For everybody."""
    return _declare(endpoint, Access(public=True))


def page(endpoint: Endpoint) -> Endpoint:
    """For everybody, and for links on pages of other sites."""
    return _declare(endpoint, Access(public=True, page=True))


def allow_any_key(endpoint: Endpoint) -> Endpoint:
    """For every key, whatever its roles."""
    return _declare(endpoint, Access())


def requires_role(role: Role) -> Callable[[Endpoint], Endpoint]:
    """For keys that have the role."""
    return lambda endpoint: _declare(endpoint, Access(role=role))


def declared_access(endpoint: object) -> Access | None:
    access: Access | None = getattr(endpoint, _ACCESS_ATTRIBUTE, None)
    return access


async def authorize(request: Request) -> ApiKey:
    """The key that asks, once it may; NOBODY where everybody may."""
    access = declared_access(request.scope["endpoint"])
    if access is None:
        log.error("a route declares no access: nobody may use it")
        raise Forbidden()
    _check_browser(request, access)
    key = ANONYMOUS if access.public else _authenticate(request)
    key_name.set(None if access.public else key.name)
    if access.role is not None and access.role not in key.roles:
        raise Forbidden(f"the key lacks the role {access.role}")
    return key


Caller = Annotated[ApiKey, Depends(authorize)]
"""For routes that do something in their caller's name."""


def _declare(endpoint: Endpoint, access: Access) -> Endpoint:
    setattr(endpoint, _ACCESS_ATTRIBUTE, access)
    return endpoint


def _check_browser(request: Request, access: Access) -> None:
    """Where a key is asked for, the name that the server is called by opens nothing."""
    check_site(request.headers, page=access.page)
    keyring: Keyring = request.app.state.keyring
    if keyring.accepts_anyone:
        hosts: AllowedHosts = request.app.state.allowed_hosts
        hosts.check(request.headers)


def _authenticate(request: Request) -> ApiKey:
    keyring: Keyring = request.app.state.keyring
    if keyring.accepts_anyone:
        return _authenticate_local(request)
    secret = key_from_headers(request.headers)
    key = None if secret is None else keyring.find(secret)
    if key is None:
        raise Unauthorized()
    return key


def _authenticate_local(request: Request) -> ApiKey:
    """A web page in a local browser can reach loopback too; the browser names it in Origin."""
    if "origin" in request.headers:
        raise Forbidden("a server without keys takes no requests from web pages")
    return LOCAL_KEY
