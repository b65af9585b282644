"""Which directory the settings ask for."""

from service.cluster.in_memory import EmbeddedDirectory
from service.cluster.redis_registry import RedisDirectory
from service.cluster.registry import Directory
from service.cluster.settings import DirectorySettings


def directory_of(settings: DirectorySettings) -> Directory:
    return EmbeddedDirectory() if settings.redis_url is None else RedisDirectory(settings)
