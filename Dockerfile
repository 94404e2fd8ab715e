# The CPU build, a fraction of the size. For an NVIDIA GPU: docker build --build-arg TORCH_INDEX= .
# (plain PyPI brings the CUDA libraries), and run with --gpus all or docker-compose.gpu.yml.
ARG PYTHON=3.12
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/slora/bin:$PATH
# Before the sources, so that a change of ours does not download torch again. The version is in TORCH.
# hadolint ignore=DL3013
RUN python -m venv /opt/slora && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH"
# The linker, for the machine code of the CPU kernels. All instruction sets take some minutes.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY adapters adapters
COPY slora slora
COPY api api
COPY demo/model demo/model
COPY demo/adapters demo/adapters
COPY demo/demo.json demo/demo.json
COPY demo/smollm2 demo/smollm2
# The ranges of versions are in pyproject.toml.
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH" ".[serve,redis,postgresql,otel,cpu]"

FROM python:${PYTHON}-slim-bookworm
ARG TORCH_INDEX
# Triton builds its launchers with a C compiler when a GPU kernel is first used. The CPU build needs none.
# hadolint ignore=DL3008
RUN if [ -z "$TORCH_INDEX" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/slora /opt/slora
# Not root, and the volume belongs to the user that runs the server.
RUN useradd --uid 10001 --user-group --create-home slora \
    && install --directory --owner slora --group slora --mode 700 /data
# The number, because Kubernetes cannot tell from a name that the user is not root.
USER 10001:10001
ENV PATH=/opt/slora/bin:$PATH SLORA_HOST=0.0.0.0 SLORA_DATA_DIR=/data TRITON_CACHE_DIR=/data/triton \
    NUMBA_CACHE_DIR=/data/numba
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD ["slora", "health", "--ready"]
CMD ["slora", "serve"]
