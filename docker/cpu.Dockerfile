# llamarl on CPUs, with the quickstart's recipes. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t llamarl:cpu .
#   mkdir -p runs
#   docker run --rm -it --shm-size=2g --user "$(id -u):$(id -g)" -v "$PWD/runs:/work/runs" llamarl:cpu \
#     llamarl train --config-dir recipes/quickstart
# Weights and rollouts are shared between processes through memory, which --shm-size limits.
FROM python:3.12-slim-bookworm

# Programs that a model wrote run contained by bubblewrap; openssl makes the certificates of several hosts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap openssl \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 \
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    OMP_NUM_THREADS=1 \
    TOKENIZERS_PARALLELISM=false

WORKDIR /src
COPY requirements.txt ./
RUN pip install -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY llamarl llamarl
RUN pip install --no-deps --no-build-isolation .

WORKDIR /work
COPY recipes recipes
# Any user may run it, such as the one whose folder is mounted; torch asks for a name and a home.
ENV HOME=/tmp \
    USER=llamarl
USER 1000:1000
CMD ["llamarl", "--help"]
