# The server on a CPU, with the bundled model as default.
#   docker build -f docker/cpu.Dockerfile -t coppice:cpu .
# For a reproducible build, pin the base image: --build-arg BASE=debian:bookworm-slim@sha256:...
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
# Debian package versions are not pinned, because security updates remove old ones from the mirrors.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv g++ \
    && python3 -m venv /opt/coppice
WORKDIR /src
COPY requirements/torch-cpu.txt requirements/cpu.txt requirements/
# Torch separately, because its CPU build may be available only on PyTorch's own index.
# hadolint ignore=DL3013
RUN { /opt/coppice/bin/pip install -qq --no-cache-dir --no-deps --require-hashes -r requirements/torch-cpu.txt \
        || /opt/coppice/bin/pip install -qq --no-cache-dir --no-deps --require-hashes -r requirements/torch-cpu.txt \
            --extra-index-url https://download.pytorch.org/whl/cpu; } \
    && /opt/coppice/bin/pip install -qq --no-cache-dir --no-deps --require-hashes -r requirements/cpu.txt
COPY pyproject.toml setup.py openapi.yaml README.md LICENSE ./
COPY client client
COPY service service
COPY engine engine
COPY kernels kernels
COPY examples examples
# A wheel is built without kernels that cannot be compiled; the image must contain them.
RUN /opt/coppice/bin/pip install -qq --no-cache-dir --no-deps --no-build-isolation ./client . \
    && /opt/coppice/bin/python -P -c "import kernels.draft_index.compiled_store as s; assert s.is_built()" \
    && { [ "$(uname -m)" != x86_64 ] \
        || /opt/coppice/bin/python -P -c "import kernels.shared_prefix_attention.cpu as c; assert c.is_built()"; } \
    && /opt/coppice/bin/pip uninstall -qq -y pip

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 -m 0700 /cache
COPY --from=build /opt/coppice /opt/coppice
# Only /cache and /dev/shm are written to; the root file system may be read-only.
# torch needs a user name, which an arbitrary uid of a pod does not have in /etc/passwd.
ENV USER=coppice \
    HOME=/cache \
    TMPDIR=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HUB_OFFLINE=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    COPPICE_SERVER__HOST=0.0.0.0 \
    COPPICE_LOG__FORMAT=json
USER 10001:10001
WORKDIR /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=6 \
    CMD ["/opt/coppice/bin/python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/livez', timeout=4)"]
ENTRYPOINT ["/opt/coppice/bin/coppice"]
CMD ["serve"]
