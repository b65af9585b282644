"""Manifests (file lists with digests) of published weights versions: creation and comparison."""

import asyncio
import base64
from pathlib import Path

from coppice.weights.checkpoint_files import INDEX
from service.checkpoint_store import sha256_of
from service.cluster.registry import ClusterView, Manifest, ManifestFile
from service.weights_versions import Version

CHANGED_FILES = "the files differ from the published ones"
DELTA = "delta.safetensors"
"""Name under which a replica serves the delta from which a version was uploaded."""


async def manifest_of(version: Version) -> Manifest:
    """Create a version's manifest. Hashes the files in a thread if they were not uploaded."""
    return await asyncio.to_thread(_manifest_of, version)


async def same_files(manifest: Manifest, path: Path) -> bool:
    """Return True if the files at a path match the manifest; False if they are unreadable."""
    try:
        return await asyncio.to_thread(_digests, path) == _published_digests(manifest)
    except OSError:
        return False


def is_published(version: Version) -> bool:
    """Return True for versions to publish: complete ones, except the engine's initial weights."""
    return version.state != "incomplete" and (version.owned or version.sequence > 0)


def was_withdrawn(version: Version, view: ClusterView) -> bool:
    """Return True if an announced version left the registry, or is there with other files."""
    if version.state == "active" or not version.announced:
        return False
    vanished = version.state != "superseded" and version.label not in view.manifests
    return vanished or (version.state != "incomplete" and conflicts_with_manifest(version, view))


def conflicts_with_manifest(version: Version, view: ClusterView) -> bool:
    """Return True if the cluster registry lists other files under the version's label.

    Always False for versions in shared directories, which `same_files` compares.
    """
    manifest = view.manifests.get(version.label)
    if manifest is None or not version.owned:
        return False
    return _published_digests(manifest) != dict(version.digests)


def digest_header(sha256: str) -> str:
    """Content-Digest header (RFC 9530) for a SHA-256 given in hexadecimal."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"


def _manifest_of(version: Version) -> Manifest:
    folder = version.path
    digests = version.digests if version.owned else _digests(folder)
    files = tuple(
        ManifestFile(name=name, sha256=digests[name], num_bytes=_size(folder, name))
        for name in sorted(digests, key=lambda name: (name != INDEX, name))
    )
    delta = None
    if version.delta_sha256 is not None:
        size = version.received_bytes
        delta = ManifestFile(name=DELTA, sha256=version.delta_sha256, num_bytes=size)
    return Manifest(
        version=version.label,
        sequence=version.sequence,
        files=files,
        base=version.base,
        delta=delta,
        path=None if version.owned else str(folder),
    )


def _published_digests(manifest: Manifest) -> dict[str, str]:
    return {file.name: file.sha256 for file in manifest.files}


def _digests(path: Path) -> dict[str, str]:
    """SHA-256 by file name, of a single file or of the files in a checkpoint directory."""
    if path.is_file():
        return {path.name: sha256_of(path)}
    files = [*path.glob("*.safetensors"), *path.glob(INDEX)]
    return {file.name: sha256_of(file) for file in files}


def _size(folder: Path, name: str) -> int:
    return (folder if folder.is_file() else folder / name).stat().st_size
