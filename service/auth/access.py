"""Access control of routes by API key and role; a route without a declaration is refused.

A decorator declares the access on the endpoint itself, and a dependency of the whole app enforces
it. Paths are never inspected: vLLM did, and a crafted Host header bypassed its check
(CVE-2026-48746).
"""

import base64
import binascii
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from starlette.datastructures import Headers

from service.auth.keys import LOCAL_KEY, ApiKey, Keyring, Role
from service.errors import Forbidden, Unauthorized
from service.http.cross_site import AllowedHosts, check_site
from service.log_context import key_name
from service.sessions.manager import SessionManager

log = logging.getLogger(__name__)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_ACCESS_ATTRIBUTE = "coppice_access"
ANONYMOUS = ApiKey(name="nobody", roles=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access declaration of an endpoint: anyone, any API key, or API keys with a certain role.

    `public`: no key is needed. `role`: the role that a key needs; None: any key is accepted.
    `page`: other sites may link to the endpoint. `x_api_key`: the key may also be in the header
    `x-api-key`, which Anthropic's clients send. `agent`: only the key of the session that the path
    names is accepted, in either header, also on a server without API keys.
    """

    public: bool = False
    agent: bool = False
    page: bool = False
    role: Role | None = None
    x_api_key: bool = False


def public(endpoint: Endpoint) -> Endpoint:
    """Decorator: allow requests to the endpoint without an API key."""
    return _declare(endpoint, Access(public=True))


def page(endpoint: Endpoint) -> Endpoint:
    """Decorator: allow requests without an API key, and links from pages of other sites."""
    return _declare(endpoint, Access(public=True, page=True))


def allow_any_key(endpoint: Endpoint) -> Endpoint:
    """Decorator: allow requests to the endpoint with any API key, whatever its roles."""
    return _declare(endpoint, Access())


def agent(endpoint: Endpoint) -> Endpoint:
    """Decorator: allow requests to the endpoint only with the key of the path's session."""
    return _declare(endpoint, Access(agent=True))


def requires_role(role: Role, *, x_api_key: bool = False) -> Callable[[Endpoint], Endpoint]:
    """Decorator: allow requests to the endpoint only with an API key that has the role."""
    return lambda endpoint: _declare(endpoint, Access(role=role, x_api_key=x_api_key))


def declared_access(endpoint: object) -> Access | None:
    access: Access | None = getattr(endpoint, _ACCESS_ATTRIBUTE, None)
    return access


async def authorize(request: Request) -> ApiKey:
    """FastAPI dependency: check access to the requested endpoint, return the caller's API key.

    Returns `ANONYMOUS` for public endpoints. Raises Unauthorized or Forbidden.
    """
    access = declared_access(request.scope["endpoint"])
    if access is None:
        log.error("route without an access declaration: every request is refused")
        raise Forbidden()
    _check_browser(request, access)
    if access.agent:
        key = await _authenticate_agent(request)
    else:
        key = ANONYMOUS if access.public else _authenticate(request, access)
    key_name.set(None if access.public else key.name)
    if access.role is not None and access.role not in key.roles:
        raise Forbidden(f"the API key lacks the role {access.role}")
    return key


Caller = Annotated[ApiKey, Depends(authorize)]
"""The caller's API key, for routes that need the name or roles of the caller."""


def _declare(endpoint: Endpoint, access: Access) -> Endpoint:
    setattr(endpoint, _ACCESS_ATTRIBUTE, access)
    return endpoint


def _check_browser(request: Request, access: Access) -> None:
    """Refuse cross-site requests and, on a server without API keys, unknown names in `Host`.

    If keys are required, DNS rebinding gives no access, so `Host` is not checked.
    """
    check_site(request.headers, page=access.page)
    keyring: Keyring = request.app.state.keyring
    if keyring.accepts_anyone:
        hosts: AllowedHosts = request.app.state.allowed_hosts
        hosts.check(request.headers)


def _authenticate(request: Request, access: Access) -> ApiKey:
    keyring: Keyring = request.app.state.keyring
    if keyring.accepts_anyone:
        return _authenticate_local(request)
    secret = key_from_headers(request.headers, x_api_key=access.x_api_key)
    key = None if secret is None else keyring.find(secret)
    if key is None:
        raise Unauthorized()
    return key


def _authenticate_local(request: Request) -> ApiKey:
    """Authenticate a request to a server without API keys; refused if sent by a foreign web page.

    A web page in a local browser can reach loopback too; the browser then sends Origin. The
    server's own page /docs is recognised by a header that only the browser itself can set, and
    that it sends over HTTPS and to loopback only, never to a rebound name.
    """
    own_page = request.headers.get("sec-fetch-site") == "same-origin"
    if "origin" in request.headers and not own_page:
        raise Forbidden("a server without API keys accepts no requests from web pages")
    return LOCAL_KEY


async def _authenticate_agent(request: Request) -> ApiKey:
    """Identity of an agent: the names of its session and of the API key that created it; no role.

    Queues are fair between API keys, then between the sessions of a key. A session of another
    replica has a key that only this replica knows, so the request is redirected before.
    """
    session_id: str = request.path_params["session_id"]
    sessions: SessionManager = request.app.state.server.sessions
    await sessions.addresses.check_local(session_id)
    given = (key_from_headers(request.headers), request.headers.get("x-api-key"))
    if not any(sessions.addresses.has_key(session_id, secret) for secret in given if secret):
        raise Unauthorized()
    owner = sessions.owner_of(session_id)
    return ApiKey(name=f"{owner}/{session_id}", roles=frozenset())


def key_from_headers(headers: Headers, *, x_api_key: bool = False) -> str | None:
    """API key in the Authorization header: a Bearer token, or the password of Basic credentials.

    With `x_api_key` it may be in the header `x-api-key` instead. None if there is no credential or
    more than one.
    """
    values = headers.getlist("authorization")
    named = headers.getlist("x-api-key") if x_api_key else []
    if len(values) + len(named) != 1:
        return None
    if named:
        return named[0].strip() or None
    scheme, _, credentials = values[0].strip().partition(" ")
    match scheme.lower():
        case "bearer":
            return credentials.strip() or None
        case "basic":
            return _password(credentials.strip())
    return None


def _password(credentials: str) -> str | None:
    """Password in HTTP Basic credentials (RFC 7617). The user name is ignored."""
    try:
        text = base64.b64decode(credentials, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.partition(":")[2] or None
