# The server on NVIDIA GPUs; the driver comes from the host, CUDA from the wheels.
#   docker build -f docker/gpu.Dockerfile -t coppice:gpu .
# With Ray, for engine.distributed_executor_backend: ray, add --build-arg RAY=true.
# For a reproducible build, pin the base image: --build-arg BASE=debian:bookworm-slim@sha256:...
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
ARG RAY=
# Debian package versions are not pinned, because security updates remove old ones from the mirrors.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv g++ \
    && python3 -m venv /opt/coppice
WORKDIR /src
COPY requirements/gpu.txt requirements/ray.txt requirements/
RUN /opt/coppice/bin/pip install -qq --no-cache-dir --no-deps --require-hashes -r requirements/gpu.txt \
        ${RAY:+-r requirements/ray.txt}
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
# Triton compiles a launcher in C for each kernel at its first use, and Inductor compiles what a graph
# computes on the CPU in C++, so the image contains both compilers; g++ depends on gcc.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev g++ libc6-dev libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 -m 0700 /cache
COPY --from=build /opt/coppice /opt/coppice
# Only /cache and /dev/shm are written to; the root file system may be read-only.
# torch needs a user name, which an arbitrary uid of a pod does not have in /etc/passwd.
ENV USER=coppice \
    PATH=/opt/coppice/bin:${PATH} \
    HOME=/cache \
    TMPDIR=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HUB_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
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
