#!/usr/bin/env bash
# Packs into .gpu/ what a lone machine with a GPU lacks to run llamarl, for session.sh there:
#
#     bash tools/gpu_session/pack.sh
#
# Such a machine has no network, but Python 3.12 on x86-64 and packages for deep learning: torch
# 2.11 or newer, numpy, safetensors, tensorboard, pyarrow, pytest. What llamarl imports beside them
# comes with the versions of requirements.txt, Monarch included. Takes 3 to 6 minutes and 50 MB; any
# Python with pip will do here (PYTHON=...).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

names="transformers huggingface-hub tokenizers hydra-core omegaconf rich math-verify
  latex2sympy2-extended httpx2 httpcore2 h11 click typer truststore pyzmq pyre-extensions cloudpickle
  lark tabulate opentelemetry-api clusterscope click-option-group flask itsdangerous blinker xxhash
  typing-inspect torchmonarch antlr4-python3-runtime"
wanted=()
for name in $names; do wanted+=("$(grep -m 1 -o "^$name==[^ ;]*" requirements.txt)"); done
platforms=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64)
for glibc in 17 24 26 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done

pip() { "$python" -m pip --disable-pip-version-check -q "$@" 2>&1 | grep -v WARNING || true; }
# The one package without a wheel is pure Python.
pip wheel --no-deps "$(grep -m 1 -o '^antlr4-python3-runtime==[^ ;]*' requirements.txt)" -w "$work/wheels"
pip install --no-deps --no-compile --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --find-links "$work/wheels" --target "$work/site" "${wanted[@]}"
for name in monarch transformers hydra; do  # what pip says of a failure stands above
  [ -d "$work/site/$name" ] || { echo "pack.sh: $name was not installed" >&2; exit 1; }
done

site=$work/site/monarch
rm -rf "$work"/site/{bin,tests,benches,examples} "$site"/gradient/*.so "$site/monarch_dashboard"
strip --strip-unneeded "$site"/_rust_bindings*.so
mkdir -p .gpu
tar -C "$work/site" -cf - . | xz -T0 -6 > .gpu/site.tar.xz
echo "packed $(du -m .gpu/site.tar.xz | cut -f 1) MB; the checkout has" \
  "$(git ls-files -z | xargs -0 stat -c %s | awk '{ sum += $1 } END { printf "%d", sum / 1e6 }') MB"
echo "in the same checkout on the other machine: bash tools/gpu_session/session.sh"
