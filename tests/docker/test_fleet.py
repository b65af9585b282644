"""The compose file of several replicas, as far as it can be checked without Docker."""

import ipaddress
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from service.config.allowed_peers import Peers
from service.config.settings import Settings
from service.config.sources import load_settings
from tests.examples.nginx import EXAMPLE

DOCKER = Path(__file__).parents[2] / "docker"
REPLICAS = ("coppice-a", "coppice-b")
# Keys of the Compose Specification used here; Compose refuses misspelt ones.
KEYS = {
    *("image", "init", "read_only", "shm_size", "cap_drop", "security_opt", "stop_grace_period"),
    *("depends_on", "networks", "environment", "volumes", "tmpfs", "command", "extends"),
}


@pytest.fixture
def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DOCKER / "fleet.yaml").read_text())
    return read


def settings_of(compose: dict[str, Any], name: str) -> Settings:
    """The settings with which the image would start."""
    environment = compose["services"][name]["environment"]
    assert all(isinstance(value, str) for value in environment.values())
    return load_settings(environ={"COPPICE_SERVER__HOST": "0.0.0.0", **environment})


def test_referenced_files_exist(compose: dict[str, Any]) -> None:
    services = compose["services"]
    single = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service.keys() <= KEYS
        assert set(service.get("depends_on", ())) <= services.keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            there = DOCKER / source if source.startswith(".") else source
            assert there.exists() if isinstance(there, Path) else there in compose["volumes"]
        if "extends" in service:
            assert service["extends"]["file"] == "compose.yaml"
            assert service["extends"]["service"] in single
    assert {services[name]["image"] for name in REPLICAS} == {single["coppice"]["image"]}


def test_each_replica_has_its_own_shared_memory_and_cache(compose: dict[str, Any]) -> None:
    replicas = [compose["services"][name] for name in REPLICAS]
    assert len({replica["volumes"][0].split(":")[0] for replica in replicas}) == len(REPLICAS)
    for replica in replicas:
        assert replica["shm_size"]
        assert (replica["read_only"], replica["cap_drop"]) == (True, ["ALL"])
        drain = int(replica["environment"]["COPPICE_SERVER__DRAIN_SECONDS"])
        assert int(replica["stop_grace_period"].removesuffix("s")) >= drain + 20


def test_replica_settings_are_valid_and_refer_to_each_other(
    compose: dict[str, Any],
) -> None:
    settings = [settings_of(compose, name) for name in REPLICAS]
    urls = [one.server.advertised_url or "" for one in settings]
    assert len(set(urls)) == len(REPLICAS)
    for one in settings:
        assert urlsplit(one.cluster.redis_url).hostname in compose["services"]
        assert all(Peers(one.weights.peers, None).allows(url) for url in urls)


def test_nginx_is_the_tested_version_and_proxies_every_replica(compose: dict[str, Any]) -> None:
    nginx = compose["services"]["nginx"]
    [mount] = nginx["volumes"]
    source, place, mode = mount.split(":")
    assert (DOCKER / source).resolve() == EXAMPLE
    assert (place, mode) == ("/etc/nginx/nginx.conf", "ro")
    text = EXAMPLE.read_text()
    balanced = re.search(r"upstream coppice \{(.*?)\}", text, re.DOTALL)
    assert balanced is not None
    assert re.findall(r"server (\S+):8000", balanced[1]) == list(REPLICAS)
    assert set(re.findall(r"server (\S+):8000", text)) == set(REPLICAS)
    listens = re.search(r"listen (\d+);", text)
    assert listens is not None
    address = nginx["networks"]["default"]["ipv4_address"]
    [network] = compose["networks"]["default"]["ipam"]["config"]
    assert ipaddress.ip_address(address) in ipaddress.ip_network(network["subnet"])
    for name in REPLICAS:
        url = urlsplit(settings_of(compose, name).server.advertised_url or "")
        assert (url.hostname, url.port) == (address, int(listens[1]))
        upstream = url.path.strip("/").replace("/", "-")
        assert f"location {url.path}/ {{\n            proxy_pass http://{upstream}/;" in text
        assert f"upstream {upstream} {{\n        server {name}:8000 max_fails=0;" in text


def test_prometheus_scrapes_every_replica_under_one_job(
    compose: dict[str, Any],
) -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())
    [found] = config["scrape_configs"][0]["dns_sd_configs"]
    single = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert set(found["names"]) <= single.keys()
    for name in REPLICAS:
        assert compose["services"][name]["networks"]["default"]["aliases"] == found["names"]
