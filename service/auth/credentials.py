"""The key in a request's Authorization header."""

import base64
import binascii

from starlette.datastructures import Headers


def key_from_headers(headers: Headers) -> str | None:
    """Bearer, or Basic with the key as the password; who sends two headers has sent none."""
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
    """RFC 7617. The user's name is up to the user."""
    try:
        text = base64.b64decode(credentials, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.partition(":")[2] or None
