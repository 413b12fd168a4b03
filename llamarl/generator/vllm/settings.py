"""The set-up of vLLM: environment, engine arguments, and its core.

Importing this file does not import vLLM, whose environment must be set before that."""

import gc
import glob
import hashlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from llamarl.core.config import LoraConfig, VllmConfig
from llamarl.core.device.devices import compute_device, platform_of
from llamarl.core.device.names import INTERFACE_VARIABLES
from llamarl.generator.vllm.limits import check_limits, memory_share
from llamarl.generator.vllm.staging import adapter_arguments
from llamarl.model.architecture import AnyArchitecture

PREFILL_TOKENS = 8192  # most tokens of one step: bounds the activations of long prompts
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core runs in this process, which owns the weights
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # a checkpoint is a folder
    "VLLM_LOGGING_LEVEL": "ERROR",  # at WARNING it logs its defaults at every start
    **dict.fromkeys(INTERFACE_VARIABLES, "lo"),  # listen on loopback only
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # more threads than idle cores is ten times slower
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other processes of the run share the cores
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-probs wait ten seconds for a C++ compiler
}


REFUSALS = (
    *(ValueError, NotImplementedError, AssertionError),
    *(AttributeError, ImportError, LookupError, TypeError, ArithmeticError, StrictDataclassError),
)
"""The errors of vLLM for a checkpoint or config that it cannot run: some say so, and others come of
a config.json that it does not expect."""


def set_environment(device: str) -> None:
    """Set the variables that vLLM reads; a value that the user has set stays."""
    # Both warn at every import, and a user can do nothing about it.
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
    wanted = ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {})
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def make_core(
    checkpoint: str,
    config: VllmConfig,
    architecture: AnyArchitecture,
    *,
    rank: int,
    num_ranks: int,
    rendezvous: str,
    run_id: str,
    lora: LoraConfig,
    records_experts: bool = False,
    num_kept_ids: int = 0,
) -> Any:
    """Return vLLM's EngineCore with random weights, in this process, as `rank` of `num_ranks`, with
    a slot for one adapter if `lora` is used. On a GPU it returns the experts of tokens if
    `records_experts`. It returns up to `num_kept_ids` log-probs of a token's alternatives.

    `rendezvous` is a path that no other replica uses; with one rank it may be empty. Raises
    ValueError, in one line, if vLLM cannot run this checkpoint with this config on this machine."""
    if torch.distributed.is_initialized():
        raise ValueError(
            "generator=vllm must have a process of its own for each rank (cluster=monarch), "
            "got one that is in a process group already"
        )
    check_limits(config, architecture, lora)
    device = compute_device(config.device, "generator.device")
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    alone = "" if rendezvous else tempfile.mkdtemp(prefix="llamarl-")
    store_path = _store_path(rendezvous or f"{alone}/store", run_id)

    class RankExecutor(UniProcExecutor):
        """Runs the one worker of this process; the other ranks run the same steps in theirs."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"file://{store_path}", rank, device.index or 0

    core = None
    try:
        _register(architecture)
        adapters = adapter_arguments(architecture, lora)
        arguments = _arguments(checkpoint, config, num_ranks, RankExecutor, adapters)
        arguments.max_logprobs = max(arguments.max_logprobs, num_kept_ids)
        if config.device == "cpu":
            _keep_weights_plain()
        else:
            arguments.enable_return_routed_experts = records_experts
            total_bytes = platform_of(device).card(device).memory_bytes
            arguments.gpu_memory_utilization = memory_share(config, architecture, total_bytes)
        core = EngineCore(arguments.create_engine_config(), RankExecutor, log_stats=False)
    except REFUSALS as error:
        raise ValueError(f"vLLM cannot run {checkpoint}: {one_line(error)}") from error
    finally:
        if core is None:
            _leave_groups()
        shutil.rmtree(alone, ignore_errors=True)
    _unlink_shared_memory(store_path, rank)
    return core


def end_core(core: Any) -> None:
    """Leave the core's process groups.

    It does not call `core.shutdown()`, which collects garbage in the whole heap and takes seconds
    on busy cores."""
    core.scheduler.shutdown()
    _leave_groups()
    gc.unfreeze()  # the core froze all objects made so far, which hides them from the collector


def _leave_groups() -> None:
    from vllm.distributed import parallel_state
    from vllm.envs import disable_envs_cache

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    disable_envs_cache()


def _arguments(
    checkpoint: str,
    config: VllmConfig,
    num_ranks: int,
    executor: type,
    adapters: Mapping[str, Any],
) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        **adapters,
        model=checkpoint,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=config.dtype,
        hf_overrides={"head_dtype": "float32"},  # logits; else rounded to the model's dtype
        quantization=None if config.quantization == "none" else config.quantization,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        scheduling_policy="priority",  # `generator/vllm/engine.py` gives the priorities
        max_num_batched_tokens=max(
            config.max_num_seqs,  # a token for each
            min(PREFILL_TOKENS, config.max_num_seqs * config.max_model_len),
        ),
        block_size=config.block_size,
        kv_cache_memory_bytes=config.kv_cache_bytes,
        kv_cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=True,
        enforce_eager=config.enforce_eager,
        tensor_parallel_size=num_ranks,
        enable_expert_parallel=config.expert_parallel and num_ranks > 1,
        distributed_executor_backend=executor,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        seed=0,
    )


def _register(architecture: AnyArchitecture) -> None:
    """Load the model's class here, because vLLM would start a process for it that takes ten
    seconds."""
    from vllm.model_executor.models import ModelRegistry

    name = architecture.model_class
    if name not in ModelRegistry.models:
        raise ValueError(f"it has no model {name}")
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _keep_weights_plain() -> None:
    """Make linear layers on the CPU compute with the weights as loaded: vLLM would pack them into
    copies that a publish cannot write."""
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep


def _store_path(rendezvous: str, run_id: str) -> str:
    """Return a path for torch's file store. vLLM names shared memory after its last part, which
    must therefore differ from that of every other replica on this host."""
    path = os.path.abspath(rendezvous)
    unique = hashlib.blake2b(f"{run_id} {path}".encode(), digest_size=8).hexdigest()
    return f"{path}-{unique}"


def _unlink_shared_memory(store_path: str, rank: int) -> None:
    """Unlink the shared memory in which ranks broadcast and (on a CPU) reduce. All of them have
    mapped it, so it is freed with the last of them, even if they are killed."""
    from vllm.distributed.parallel_state import get_tp_group

    queue = get_tp_group().mq_broadcaster
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False  # else it would unlink it again
    for path in Path("/dev/shm").glob(f"{glob.escape(Path(store_path).name)}-*_{rank}"):
        path.unlink(missing_ok=True)


def one_line(error: Exception) -> str:
    """Return the first line with information, of REFUSALS: pydantic and vLLM write several."""
    if isinstance(error, REFUSALS[3:]):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if "validation error" not in line]
    line = (informative or lines or [type(error).__name__])[0].split(" [type=")[0]
    return line.replace(
        "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE", "generator.kv_cache_bytes"
    )
