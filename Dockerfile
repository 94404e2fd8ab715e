# The CPU build, a fraction of the size. For an NVIDIA GPU: docker build --build-arg TORCH_INDEX= .
# (plain PyPI brings the CUDA libraries), and run with --gpus all or the `deploy` section of Compose.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/slora/bin:$PATH
RUN python -m venv /opt/slora
# Before the sources, so that a change of ours does not download torch again.
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH"
WORKDIR /source
COPY pyproject.toml README.md ./
COPY kernels kernels
COPY adapters adapters
COPY slora slora
COPY api api
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH" ".[serve,redis,postgresql,otel,cpu]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/slora /opt/slora
# Not root, and the volume belongs to whom the server runs as.
RUN useradd --uid 10001 --create-home slora && install --directory --owner slora --group slora --mode 700 /data
USER slora
ENV PATH=/opt/slora/bin:$PATH SLORA_HOST=0.0.0.0 SLORA_DATA_DIR=/data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD ["slora", "health", "--ready"]
CMD ["slora", "serve"]
