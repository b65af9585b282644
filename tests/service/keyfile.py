"""A file of API keys, for tests of authorization."""

from pathlib import Path

import yaml

from service.auth.keys import generate_key


def write_keys(file: Path, **roles: str) -> dict[str, str]:
    """Creates new keys, returned by name; `roles` has each key's roles, separated by commas."""
    made = {name: generate_key(name, of.split(",")) for name, of in roles.items()}
    file.write_text("".join(lines for _, lines in made.values()), encoding="utf-8")
    return {name: secret for name, (secret, _) in made.items()}


def entries(file: Path) -> list[dict[str, object]]:
    content: list[dict[str, object]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}
