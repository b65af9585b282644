"""Factory of the cluster registry that the settings select."""

from service.cluster.in_memory import InMemoryRegistry
from service.cluster.redis_registry import RedisRegistry
from service.cluster.registry import ClusterRegistry
from service.cluster.settings import DirectorySettings


def create_registry(settings: DirectorySettings) -> ClusterRegistry:
    return InMemoryRegistry() if settings.redis_url is None else RedisRegistry(settings)
