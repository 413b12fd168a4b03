"""A trial of a recipe's own executors: a few steps on a tiny model, compared with the CPU's
results."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llamarl.cli.findings import Findings
from llamarl.cli.start_engines import running_engines
from llamarl.controller.colocation import Phase
from llamarl.controller.library import LibraryEngines
from llamarl.controller.memory import HOST, forecast_memory
from llamarl.core.config import Config
from llamarl.core.config.generator import pools_of
from llamarl.core.config.rank_assignment import needs_gpu
from llamarl.core.device.names import TOOL, cards_here
from llamarl.core.groups import BatchRollout, Group
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    KEPT_IDS,
    PROMPT_IDS,
    RESPONSE_IDS,
    ROUTED_EXPERTS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
)
from llamarl.metrics.provenance import keep_nothing
from llamarl.model import hf
from llamarl.model.architecture import (
    EXPERTS,
    FAMILIES,
    Architecture,
    ExpertFamily,
    ExpertSizes,
    read_architecture,
)
from llamarl.model.inventory import replays_routing
from llamarl.model.transformer import Transformer
from llamarl.recipe.inputs import Inputs
from llamarl.recipe.rules import without_evaluation, without_own_stages, without_rewards
from llamarl.scoring.user_code.watchdog import descendants
from llamarl.trainer.losses import find_loss
from llamarl.trainer.passes import Passes, infer
from llamarl.trainer.policy_loss import denominator

CPU = torch.device("cpu")
NUM_LAYERS = 2
HIDDEN_SIZE = 128
EXPERT_CHANNELS = 64  # a multiple of 16, as grouped products on a GPU want
SCALE = 0.08  # of random weights: logits of about 1, so that a wrong product shows in log-probs


def write_tiny_checkpoint(config: Config, inputs: Inputs, folder: Path) -> str:
    """Write a checkpoint of random weights, with the recipe's tokenizer, below `folder`; return its
    path."""
    description = json.loads((Path(inputs.checkpoint) / "config.json").read_text())
    ranks = {config.trainer.tensor_parallel}
    ranks |= {pool.generator.num_ranks for pool in pools_of(config.generator)}
    unit = math.lcm(*ranks)
    num_heads = description["num_attention_heads"]
    num_kv_heads = description.get("num_key_value_heads") or num_heads
    kv_heads = max(2, unit)
    description |= {
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": HIDDEN_SIZE * unit,
        "intermediate_size": 2 * HIDDEN_SIZE * unit,
        "num_attention_heads": kv_heads if num_heads == num_kv_heads else 2 * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": description.get("head_dim") or description["hidden_size"] // num_heads,
    }
    for key in ("layer_types", "max_window_layers"):  # one entry per layer, and all are alike
        description.pop(key, None)
    if (experts := read_architecture(inputs.checkpoint).experts) is not None:
        family = FAMILIES[description["model_type"]].experts or ExpertFamily()
        num_experts, channels = tiny_experts(config, experts)
        description |= {key: num_experts for key in EXPERTS if key in description}
        description |= {family.size_key: channels, "decoder_sparse_step": 1}
        description["mlp_only_layers"] = [0] if experts.dense_layers else []
    source = folder / "sizes"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(description))
    generator = torch.Generator().manual_seed(0)
    model = Transformer(read_architecture(source))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn(parameter.shape, generator=generator) * SCALE
            parameter.copy_(spread + 1.0 if name.endswith("norm.weight") else spread)
    target = folder / "checkpoint"
    hf.save(
        target,
        model.named_parameters(),
        source_folder=source,
        tokenizer_folder=inputs.tokenizer_folder,
        dtype=torch.float32,
    )
    return str(target)


def tiny_experts(config: Config, experts: ExpertSizes) -> tuple[int, int]:
    """Return the number of experts, twice those that a token meets if the model has as many, and
    the channels of each, so that all ranks can share them."""
    trainer = config.trainer
    ranks = {trainer.expert_parallel}
    ranks |= {pool.generator.num_ranks for pool in pools_of(config.generator)}
    unit = math.lcm(*ranks)
    few = unit * math.ceil(2 * experts.num_chosen / unit)
    channels = math.lcm(trainer.num_expert_shard_ranks, EXPERT_CHANNELS * unit)  # vLLM cuts them
    return min(experts.num_experts, few), channels


START_S, CALL_S = 180.0, 60.0
NUM_PROMPTS, NUM_ROLLOUTS, PROMPT_TOKENS, NEW_TOKENS = 4, 2, 24, 12
READ = [PROMPT_IDS, RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING]
HANGS = "a rank waits for another one: see the log of each process, the network interface"
STOPS = "see the logs of the processes"


def tolerances(config: Config) -> tuple[float, float, float]:
    """Return how far log-probs (median, largest) and the gradient's norm may be from the CPU's
    float32. float32 differs by how sums are ordered; 16 and 8 bits by their rounding, with a long
    tail."""
    is_exact = config.generator.is_exact
    gradient = 2e-3 if is_exact and config.trainer.compute_dtype == "float32" else 0.15
    return (1e-3, 1e-2, gradient) if is_exact else (0.5, 2.0, gradient)


def tiny_config(config: Config, checkpoint: str, tokenizer: str) -> Config:
    """Return the recipe on the tiny model, with few short rollouts that are one answer each and get
    their rewards from the trial."""
    config = without_own_stages(without_rewards(without_evaluation(config)))
    generator, trainer = config.generator, config.trainer
    small: dict[str, Any] = {"max_num_seqs": NUM_PROMPTS * NUM_ROLLOUTS, "elastic": []}
    if hasattr(generator, "kv_cache_bytes"):
        small["kv_cache_bytes"] = min(generator.kv_cache_bytes, 1 << 28)
    num_tokens = min(trainer.tokens_per_micro_batch, 4096)
    algorithm = replace(config.algorithm, kl_coefficient=0.0, filters=[])
    return replace(
        config,
        model=replace(config.model, checkpoint=checkpoint, tokenizer=tokenizer, architecture=None),
        algorithm=algorithm,
        generator=replace(generator, **small),
        trainer=replace(trainer, tokens_per_micro_batch=num_tokens, groups_per_step=NUM_PROMPTS),
        sampling=replace(
            config.sampling,
            max_tokens=NEW_TOKENS,
            rollouts_per_prompt=NUM_ROLLOUTS,
            segment_tokens=0,
            stop_strings=[],
            replay_lengths=None,
        ),
        dispatch=replace(config.dispatch, ranker="none"),
        checkpoint=replace(config.checkpoint, resume="off"),
    )


class Trial:
    """The calls of the trial, in their order; each is one line of `findings`. The checkpoint of
    `config` is computed on the CPU too."""

    def __init__(self, config: Config, findings: Findings) -> None:
        self._config, self._findings = config, findings
        self._median, self._largest, self._gradient = tolerances(config)
        self._architecture = read_architecture(config.model.checkpoint)
        self._model = Transformer(self._architecture)
        hf.load_into(dict(self._model.named_parameters()), config.model.checkpoint)
        replays = replays_routing(config, self._architecture)
        self._read = [*READ, *[ROUTED_EXPERTS] * replays]
        self._read += [KEPT_IDS] * (config.sampling.top_k > 0)
        self._free_before = free_bytes()
        self._random = np.random.default_rng(0).random((NUM_PROMPTS, PROMPT_TOKENS))
        self._groups: list[Group] = []  # what the generators wrote first, and its columns
        self._columns: Columns = {}

    async def run(self, run_dir: str) -> None:
        """Run every check, except those that need executors which failed to start."""
        async with AsyncExitStack() as stack:
            engines = await self._start(stack, f"{run_dir}/run", "executors start", self._config)
            if engines is not None:
                await self._ask(engines)
        await self._compare_graphs(run_dir)

    async def _ask(self, engines: LibraryEngines) -> None:
        """Run the checks until one fails: those after it would wait for it, or be wrong because of
        it."""
        calls: list[tuple[str, str, Callable[[LibraryEngines], Awaitable[str]]]] = [
            ("publish", HANGS, self._publish),
            ("generation", STOPS, self._generate),
            ("step", HANGS, self._step),
            ("publish after a step", HANGS, self._publish),
            ("generation after a step", STOPS, self._generate_again),
        ]
        for name, remedy, call in calls:
            if not await self._findings.await_for(name, CALL_S, remedy, call(engines)):
                return
        if not needs_gpu(self._config) or not self._config.cluster.hosts:
            measured = self._config, self._architecture, self._free_before
            self._findings.ask("memory in use", lambda: compare_with_plan(*measured))

    async def _start(
        self, stack: AsyncExitStack, run_dir: str, name: str, config: Config
    ) -> LibraryEngines | None:
        started: list[LibraryEngines] = []

        async def start() -> str:
            own = replace(config, run_dir=run_dir)
            engines = running_engines(own, keep_nothing, executors={"generator", "trainer"})
            started.append(await stack.enter_async_context(engines))
            ranks = config.trainer.num_ranks
            ranks += config.generator.num_replicas * config.generator.num_ranks
            return f"{ranks} ranks met"

        await self._findings.await_for(name, START_S, HANGS, start())
        return started[0] if started else None

    async def _publish(self, engines: LibraryEngines) -> str:
        async with engines.phase(Phase.SYNC):
            stats = await engines.sync_weights()
        if stats.lost:
            replica, why = next(iter(stats.lost.items()))
            raise RuntimeError(f"replica {replica} was lost: {why}")
        return (
            f"version {engines.published} over {self._config.weights.transport} in "
            f"{stats.seconds:.2f} s, sums of both sides equal"
        )

    async def _write(self, engines: LibraryEngines) -> tuple[list[Group], Columns]:
        questions = (self._random * engines.tokenizer.num_ids).astype(int).tolist()
        groups = await engines.generate(questions, NUM_ROLLOUTS)
        row_ids = [row_id for group in groups for row_id in group.row_ids]
        return groups, await engines.get_experience(row_ids, self._read)

    async def _generate(self, engines: LibraryEngines) -> str:
        """Check that the log-probs of what the generators write are the CPU's."""
        self._groups, columns = await self._write(engines)
        self._columns, mine = columns, columns[GENERATOR_LOGPROBS]
        every = range(len(mine))
        wanted = infer(self._model, columns, [every], self._config.sampling.temperature, CPU)
        apart = np.concatenate([np.abs(mine[i] - wanted[i]) for i in every])
        return self._compare(apart.tolist(), "the CPU")

    def _compare(self, differences: Sequence[float], whose: str) -> str:
        middle, largest = median(differences), max(differences)
        words = f"log-probs are {middle:.2g} from those of {whose}, {largest:.2g} at most"
        if not (middle <= self._median and largest <= self._largest):
            raise RuntimeError(
                f"{words}, must be below {self._median:g} and {self._largest:g}: this device, or "
                "the engine on it, computes another model; try generator.dtype=float32, "
                "generator.enforce_eager=true"
            )
        return words

    async def _step(self, engines: LibraryEngines) -> str:
        """Check that the norm of the gradient is the CPU's."""
        for group in self._groups:
            rewards = [float(i % 2) for i in range(NUM_ROLLOUTS)]
            if reason := await engines.settle(group, rewards):
                raise RuntimeError(f"a group was dropped ({reason})")
        async with engines.phase(Phase.TRAIN):
            await engines.forward_backward(self._groups)
            stats = await engines.optim_step()
        found = stats.scalars["grad_norm"]
        wanted = self._gradient_norm()
        words = f"gradient norm {found:.4g}, on the CPU {wanted:.4g}"
        if abs(found / wanted - 1) > self._gradient:
            raise RuntimeError(
                f"{words}: must be within {self._gradient:.1%}; try "
                "trainer.compute_dtype=float32, trainer.compile=none"
            )
        return words

    def _gradient_norm(self) -> float:
        """Return the gradient's norm on the CPU, before it is clipped, of the step that these
        rollouts make."""
        config, columns = self._config, self._columns
        pairs = [(g, i) for g in self._groups for i in range(len(g.row_ids))]
        lengths = zip(columns[PROMPT_IDS], columns[RESPONSE_IDS], strict=True)
        rows = [
            BatchRollout(
                row_id=group.row_ids[i],
                group_id=group.group_id,
                num_prompt_tokens=len(prompt),
                num_tokens=len(response),
                num_generated=len(response),
                advantage=group.advantages[i],
                oldest_version=0,
            )
            for (group, i), (prompt, response) in zip(pairs, lengths, strict=True)
        ]
        policy = SimpleNamespace(model=self._model, finish_inference=lambda: None)
        passes = Passes(policy, CPU, config, find_loss(config.algorithm))  # type: ignore[arg-type]
        passes.accumulate(rows, columns, [range(len(rows))])
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()
        num_tokens, most = sum(row.num_generated for row in rows), config.sampling.max_tokens
        return norm / denominator(num_tokens, len(rows), most, config.algorithm)

    async def _generate_again(self, engines: LibraryEngines) -> str:
        """Check that the log-probs of what the generators write are those of the trainer's new
        version. If both share a device, all has been offloaded and brought back meanwhile."""
        groups, _ = await self._write(engines)
        row_ids = [row_id for group in groups for row_id in group.row_ids]
        colocated = self._config.placement.colocated
        async with engines.phase(Phase.TRAIN) if colocated else nullcontext():
            differences = await engines.compare_logprobs(row_ids)
        await engines.retire(groups, "dropped", reason="checked")
        return self._compare(differences, "the trainer")

    async def _compare_graphs(self, run_dir: str) -> None:
        """Check that captured graphs write the same rollouts as single launches."""
        generator = self._config.generator
        if not needs_gpu(self._config) or generator.enforce_eager or not self._columns:
            return
        eager = replace(self._config, generator=replace(generator, enforce_eager=True))
        async with AsyncExitStack() as stack:
            engines = await self._start(stack, f"{run_dir}/eager", "executors start, eager", eager)
            if engines is None:
                return

            async def compare() -> str:
                await self._publish(engines)
                _, columns = await self._write(engines)
                return same_rollouts(columns, self._columns, self._largest)

            await self._findings.await_for("graphs", CALL_S, STOPS, compare())


def same_rollouts(columns: Columns, graphed: Columns, most: float) -> str:
    """Say how far rollouts of one seed are equal without captured graphs and with them.

    Products round differently with the number of rows that are computed at once, which depends on
    when requests arrive: so in 16 bits a token may differ, and then all that follow it.
    RuntimeError if the log-probs of equal beginnings are more than `most` apart, or more than half
    of the tokens are behind a difference.
    """
    num_same = num_equal = num_tokens = 0
    apart = [0.0]
    for i, (ids, others) in enumerate(
        zip(columns[RESPONSE_IDS], graphed[RESPONSE_IDS], strict=True)
    ):
        shorter = min(len(ids), len(others))
        differing = np.flatnonzero(ids[:shorter] != others[:shorter])
        num_common = int(differing[0]) if len(differing) else shorter
        mine, theirs = (each[GENERATOR_LOGPROBS][i][:num_common] for each in (columns, graphed))
        apart += np.abs(mine - theirs).tolist()
        num_same += num_common == len(ids) == len(others)
        num_equal, num_tokens = num_equal + num_common, num_tokens + max(len(ids), len(others))
    words = (
        f"{num_same} of {len(columns[RESPONSE_IDS])} rollouts are the same without captured graphs,"
        f" log-probs of equal beginnings are {max(apart):.2g} apart at most"
    )
    if max(apart) > most or 2 * num_equal < num_tokens:
        raise RuntimeError(
            f"{words}: must be below {most:g}, and {num_equal} of {num_tokens} equal tokens must "
            "be at least half; set generator.enforce_eager=true"
        )
    return words


GIB = 2**30
OWN = ("Pss_Anon:", "Pss_Shmem:")  # of smaps_rollup, in KiB; memory of files is left out


def free_bytes() -> list[int]:
    """Return the free bytes of each card."""
    return [card.free_bytes for card in cards_here()]


def compare_with_plan(config: Config, architecture: Architecture, free_before: list[int]) -> str:
    """Return the memory in use beside the plan's, in words; ValueError if more is in use than the
    plan counts with."""
    ranks = forecast_memory(config, architecture).ranks
    if needs_gpu(config):
        taken = [before - now for before, now in zip(free_before, free_bytes(), strict=True)]
        if not taken:
            return f"{TOOL} does not say"
        used_bytes, where = max(taken), "on the fullest card"
        planned_bytes = max(rank.total_bytes for rank in ranks if rank.executor != HOST)
    else:
        found = descendants(os.getpid()) or {os.getpid()}
        used_bytes, where = sum(map(_own_bytes, found)), f"in {len(found)} processes"
        planned_bytes = next(rank.total_bytes for rank in ranks if rank.executor == HOST)
    words = f"{used_bytes / GIB:.2f} GiB {where}; the plan counts with {planned_bytes / GIB:.2f}"
    if used_bytes > planned_bytes:
        raise ValueError(
            f"{words}: the recipe may need more than llamarl plan says; leave room for it "
            "(generator.max_num_seqs, trainer.tokens_per_micro_batch)"
        )
    return words


def _own_bytes(process: int) -> int:
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(OWN))
    return 0
