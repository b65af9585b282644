"""Parsing of the API key in the Authorization header."""

import base64
import binascii

from starlette.datastructures import Headers


def key_from_headers(headers: Headers) -> str | None:
    """The key of a Bearer header, or of a Basic header with the key as its password.

    None if there is no Authorization header or more than one.
    """
    values = headers.getlist("authorization")
    if len(values) != 1:
        return None
    scheme, _, credentials = values[0].strip().partition(" ")
    match scheme.lower():
        case "bearer":
            return credentials.strip() or None
        case "basic":
            return _password(credentials.strip())
    return None


def _password(credentials: str) -> str | None:
    """Password of Basic credentials (RFC 7617). The user name is ignored."""
    try:
        text = base64.b64decode(credentials, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.partition(":")[2] or None
