# One image for every process of Cairn: Ray head and workers, scheduler, search API, ingest.
#   docker build --tag cairn:0.1.0 .
# PyPI's build of PyTorch brings CUDA, so the image serves machines with and without a GPU. For a far smaller one without, give the index
# of PyTorch's CPU builds: --build-arg TORCH_INDEX=URL.

FROM python:3.11.14-slim-bookworm AS build
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/cairn
ENV PATH=/opt/cairn/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY cli cli
COPY jobs jobs
RUN pip install --constraint constraints.txt '.[cpu,schedule,serve-ray,store]'

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 10001 cairn \
    && useradd --uid 10001 --gid 10001 --create-home cairn \
    && install --directory --owner 10001 --group 10001 /var/cache/cairn /srv/cairn
COPY --from=build /opt/cairn /opt/cairn
# Where `docker compose` keeps schedules: a new volume begins as a copy of this folder.
COPY --chown=10001:10001 jobs/configs/compose /srv/cairn/schedules
ENV PATH=/opt/cairn/bin:$PATH \
    CAIRN_CACHE=/var/cache/cairn \
    HF_HUB_OFFLINE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    TOKENIZERS_PARALLELISM=false
USER 10001:10001
WORKDIR /srv/cairn
CMD ["cairn", "--help"]
