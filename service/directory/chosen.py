"""Which directory the settings ask for."""

from service.directory.directory import Directory
from service.directory.embedded import EmbeddedDirectory
from service.directory.over_redis import RedisDirectory
from service.directory.settings import DirectorySettings


def directory_of(settings: DirectorySettings) -> Directory:
    return EmbeddedDirectory() if settings.redis_url is None else RedisDirectory(settings)
