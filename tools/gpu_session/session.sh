#!/usr/bin/env bash
# Says what one GPU can say of llamarl, in a checkout on its machine:
#
#     bash tools/gpu_session/session.sh [PART ...]
#
# probe   each assumption of the code for CUDA (tools/gpu_probe.py)
# tests   the tests of tests/gpu, a file at a time, and `llamarl check`
# speed   tools/bench_gpu.py, a section at a time
# runs    a model of a billion parameters with each way to offload it, and compiled; the quickstart,
#         with all weights, with adapters, and with a generator in fp8
#
# Without PART all of them: about 15 minutes on an H100. One thing runs at a time, for most of it
# measures the whole card. Whatever fails or takes too long, the others go on; the exit code says
# whether any did. Each command has a log, and "[12 s] NAME rc=0 3 s: its last line" in session.log.
# Logs, figures and what the runs wrote lie in $OUT (default gpu-session), and in $OUT/logs.tgz.
#
# Packages that the machine lacks come from .gpu/, if pack.sh was run before; else PYTHON (python3)
# has them. DEVICE=cpu runs the smallest form of everything, where the tests of tests/gpu are only
# collected: it shows that a session works before a card waits for it.
set -uo pipefail
cd "$(dirname "$0")/../.."
started=$SECONDS failed=0
python=${PYTHON:-python3} device=${DEVICE:-cuda}
out=$(mkdir -p "${OUT:-gpu-session}" && cd "${OUT:-gpu-session}" && pwd)
parts=" ${*:-probe tests speed runs} "
here=tools/gpu_session logs=$out/logs
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$logs"

for part in $parts; do
  case $part in probe | tests | speed | runs) ;; *)
    echo "session.sh: a part must be probe, tests, speed or runs, got $part" >&2
    exit 2 ;;
  esac
done

say() { echo "[$((SECONDS - started)) s] $*" | tee -a "$logs/session.log"; }

# one NAME SECONDS COMMAND...: runs it with a limit; a CPU may be busy with other work.
one() {
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  [ "$device" = cuda ] || limit=$((limit * 10))
  timeout -k 5 "$limit" "$@" > "$logs/$name.log" 2>&1
  local code=$?
  [ $code = 0 ] || failed=1
  say "$name rc=$code $((SECONDS - began)) s: $(grep . "$logs/$name.log" | tail -n 1 | cut -c 1-150)"
}

has() { [[ $parts == *" $1 "* ]]; }

if [ -f .gpu/site.tar.xz ]; then
  "$python" -c 'import sys, tarfile
with tarfile.open(sys.argv[1]) as packed: packed.extractall(sys.argv[2], filter="fully_trusted")' \
    .gpu/site.tar.xz "$work/site" || exit 1
fi
export PYTHONPATH=$work/site:$PWD:${PYTHONPATH:-} PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$work/triton
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
say "$(git describe --always --dirty 2> /dev/null), torch $("$python" -c 'import torch
print(torch.__version__)' 2>&1 | tail -n 1)"

quickstart=(--config-dir recipes/quickstart metrics.live=false)
billion=(--config-dir $here --config-name one_billion metrics.live=false num_steps=3
  "model.checkpoint=$work/model/checkpoint" "sampling.replay_lengths=$work/model/lengths.json")
if [ "$device" = cuda ]; then
  say "$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1)"
  colocated=(generator.device=cuda trainer.device=cuda cluster.num_gpus_per_host=1
    weights=cuda_ipc placement=colocated)
  billion+=("${colocated[@]}" generator.dtype=bfloat16 trainer.compute_dtype=bfloat16)
  bench=() model=() offloads="none pinned"
else
  colocated=(placement=colocated)
  billion+=(placement=colocated trainer.groups_per_step=2 sampling.rollouts_per_prompt=2
    sampling.max_tokens=12 generator.max_model_len=96 generator.max_num_seqs=8)
  quickstart+=(num_steps=1 trainer.groups_per_step=2 sampling.max_tokens=8 evaluation.max_prompts=2)
  bench=(--tiny) model=(--tiny) offloads="none file"
fi

if has probe; then
  one probe 600 "$python" tools/gpu_probe.py --device "$device" --json "$logs/probe.json"
fi

if has tests; then
  pytest=("$python" -m pytest -m gpu -p no:cacheprovider --tb=short)
  if [ "$device" = cuda ]; then
    for name in weights groups generation generator offload; do
      one "test_$name" 150 "${pytest[@]}" -v --durations=5 "tests/gpu/test_${name}_gpu.py"
    done
  else
    one tests 150 "${pytest[@]}" --collect-only tests/gpu
  fi
  one check 150 "$python" -m llamarl check "${quickstart[@]}" "${colocated[@]}"
fi

if has speed; then
  for name in generation training publish offload memory loop; do  # a crash loses one of them
    one "bench_$name" 160 "$python" tools/bench_gpu.py --device "$device" "${bench[@]}" \
      --only "$name" --json "$logs/bench_$name.json"
  done
fi

# train NAME ARGUMENT...: a run, and what it leaves that is small.
train() {
  local name=$1
  shift
  one "$name" 150 "$python" -m llamarl train "$@" "run_dir=$work/$name"
  mkdir -p "$logs/$name"
  for file in metrics.jsonl summary.json trace.json logs; do
    [ ! -e "$work/$name/$file" ] || cp -r "$work/$name/$file" "$logs/$name/"
  done
}

if has runs; then
  one model 90 "$python" tools/make_random_model.py "$work/model" --device "$device" "${model[@]}"
  for offload in $offloads; do
    train "billion_$offload" "${billion[@]}" "placement.offload=$offload"
  done
  train quickstart "${quickstart[@]}" "${colocated[@]}"
  train quickstart_adapters "${quickstart[@]}" "${colocated[@]}" trainer.lora.rank=16
  if [ "$device" = cuda ]; then
    train billion_compiled "${billion[@]}" placement.offload=none trainer.compile=inductor \
      trainer.activation_checkpointing=full
    train quickstart_fp8 "${quickstart[@]}" "${colocated[@]}" generator.quantization=fp8
  fi
fi

say "done, rc=$failed"
tar -C "$out" -czf "$out/logs.tgz" logs
exit $failed
