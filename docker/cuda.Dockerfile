# llamarl with vLLM for NVIDIA GPUs. From the repository's root; the host needs driver 580 or newer and the NVIDIA
# container toolkit:
#   docker build -f docker/cuda.Dockerfile -t llamarl:cuda .
#   mkdir -p runs
#   docker run --rm -it --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD/runs:/work/runs" \
#     llamarl:cuda llamarl check --config-dir recipes/quickstart generator.device=cuda trainer.device=cuda
# The wheels of torch bring CUDA's libraries; the -devel image adds the compiler that torch.compile and Triton call.
# --ipc=host lets ranks and engines share memory of the host and of the cards.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
      bubblewrap gcc libc6-dev openssl python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/llamarl/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    TOKENIZERS_PARALLELISM=false
RUN python3 -m venv /opt/llamarl

WORKDIR /src
COPY requirements/vllm.txt requirements/vllm.txt
RUN pip install -r requirements/vllm.txt
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY llamarl llamarl
RUN pip install --no-build-isolation .

WORKDIR /work
COPY recipes recipes
# Any user may run it, such as the one whose folder is mounted; torch asks for a name and a home.
ENV HOME=/tmp \
    USER=llamarl
USER 1000:1000
CMD ["llamarl", "--help"]
