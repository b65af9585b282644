"""Manifests: versions as they are published in the cluster registry."""

import base64
import hashlib
from pathlib import Path

from service.cluster.registry import ClusterView, Manifest, ManifestFile
from service.weights.checkpoint_store import INDEX
from service.weights.versions import Version

DELTA = "delta.safetensors"
"""Name under which a replica serves the delta that a version was uploaded as."""


def manifest_of(version: Version) -> Manifest:
    """Manifest of a version. Blocking: hashes the files if they are in an external directory."""
    folder = version.path
    digests = dict(version.digests) if version.owned else _digests(folder)
    sizes = {name: _file(folder, name).stat().st_size for name in digests}
    files = tuple(
        ManifestFile(name=name, sha256=digests[name], num_bytes=sizes[name])
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


def same_files(manifest: Manifest, path: Path) -> bool:
    """Compare the files at a path with the manifest. Blocking. False if they cannot be read."""
    try:
        return _digests(path) == {file.name: file.sha256 for file in manifest.files}
    except OSError:
        return False


def is_published(version: Version) -> bool:
    """Return False for the weights that the engine started with and for incomplete versions."""
    return version.state != "incomplete" and (version.owned or version.sequence > 0)


def was_withdrawn(version: Version, view: ClusterView) -> bool:
    """Return True if an announced version is unpublished, or published with other files."""
    if version.state == "active" or not version.announced:
        return False
    vanished = version.state != "superseded" and version.label not in view.manifests
    return vanished or (version.state != "incomplete" and conflicts_with_manifest(version, view))


def conflicts_with_manifest(version: Version, view: ClusterView) -> bool:
    """Return True if the registry has other files under the version's label.

    Always False for versions in shared directories, which `same_files` compares.
    """
    manifest = view.manifests.get(version.label)
    if manifest is None or not version.owned:
        return False
    return {file.name: file.sha256 for file in manifest.files} != dict(version.digests)


def digest_header(sha256: str) -> str:
    """Content-Digest header (RFC 9530) of a SHA-256 in hexadecimal."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"


def _digests(path: Path) -> dict[str, str]:
    """SHA-256 by file name, of one file or of a checkpoint directory."""
    if path.is_file():
        return {path.name: _sha256(path)}
    files = [*path.glob("*.safetensors"), *path.glob(INDEX)]
    return {file.name: _sha256(file) for file in files}


def _file(folder: Path, name: str) -> Path:
    return folder if folder.is_file() else folder / name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
