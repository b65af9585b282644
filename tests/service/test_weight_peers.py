"""Sources of weights: only addresses configured by the operator."""

from pathlib import Path

import pytest

from service.config.allowed_peers import Peers, parse_allowed
from service.config.sources import SettingsError, load_settings

ALLOWED = (
    "http://10.0.0.0/8:8000",
    "https://*.replicas.example",
    "http://one:80",
    "http://[fd00::]/8:*",
)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.1.2.3:8000",
        "http://10.1.2.3:8000/prefix",
        "https://a.replicas.example",
        "https://a.b.REPLICAS.example:443/",
        "http://one",
        "http://[fd00::1]:1234",
    ],
)
def test_configured_addresses_are_used(url: str) -> None:
    assert Peers(ALLOWED, None).allows(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://10.1.2.3:8000",
        "http://10.1.2.3:8001",
        "http://10.1.2.3",
        "http://11.1.2.3:8000",
        "http://10.1.2.3.example:8000",
        "http://169.254.169.254:8000",
        "https://replicas.example",
        "https://evilreplicas.example",
        "https://a.replicas.example.evil",
        "http://a.replicas.example:443",
        "http://user:key@one",
        "http://one:80@evil",
        "http://one:99999",
        "http://[::1",
        "file:///one",
        "//one",
        "one",
        "",
        "http://2130706433:8000",
        "http://0x0a000001:8000",
        "http://010.1.2.3:8000",
        "http://one/\x01",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    assert not Peers(ALLOWED, None).allows(url)


def test_without_configured_addresses_nothing_is_fetched() -> None:
    assert not Peers((), None).allows("http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "text", ["one", "ftp://one", "http://", "http://one/path", "http://10.0.0.1/8", "http://*", "*"]
)
def test_invalid_address_fails_the_start(text: str) -> None:
    with pytest.raises(ValueError):
        parse_allowed(text)
    with pytest.raises(SettingsError, match=r"weights"):
        load_settings(flags={"weights": {"peers": text}}, environ={})


def test_addresses_are_separated_by_spaces() -> None:
    settings = load_settings(flags={"weights": {"peers": "http://one http://two:1"}}, environ={})
    assert settings.weights.peers == ("http://one", "http://two:1")


def test_key_is_read_on_every_use(tmp_path: Path) -> None:
    file = tmp_path / "key"
    peers = Peers((), file)
    for key in ("old", "new"):
        file.write_text(f"{key}\n")
        assert peers.headers() == {"Authorization": f"Bearer {key}"}
    assert Peers((), None).headers() == {}
