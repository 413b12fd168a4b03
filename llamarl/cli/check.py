"""The command `llamarl check`.

It ends with status 0 only if no check failed, and leaves no process and no file behind."""

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from rich.console import Console

from llamarl.cli.findings import Findings
from llamarl.controller.fit import check_cards, check_fit
from llamarl.core.config import Config
from llamarl.core.config.rank_assignment import needs_gpu
from llamarl.core.fields import require
from llamarl.model.architecture import OtherArchitecture
from llamarl.recipe.inputs import Inputs, read_frozen, read_inputs
from llamarl.recipe.prompt_inputs import refuse_imitation


async def check(config: Config, console: Console) -> None:
    """Say on `console` what of the recipe works on this machine. ValueError at the end if a check
    failed: which ones."""
    findings = Findings(console)
    inputs: list[Inputs] = []

    def read() -> str:
        refuse_imitation(config, "llamarl check")
        inputs.append(read_inputs(config))
        found = inputs[0]
        return f"{found.architecture.model_type}, {len(found.prompts)} prompts"

    def fit() -> str:
        check_fit(config, inputs[0].architecture, read_frozen(config, inputs[0].graph))
        return "by forecast, all that the recipe needs fits (llamarl plan says more)"

    findings.ask("recipe", read)
    findings.ask("torch", lambda: check_torch(config))
    findings.ask("cards", lambda: check_cards(config))
    if inputs and not findings.failed:
        findings.ask("memory", fit)
        if isinstance(inputs[0].architecture, OtherArchitecture):
            kind = inputs[0].architecture.model_type
            findings.skip("executors", f"a {kind} is computed by other code than the CPU's here")
        elif not findings.failed:
            if config.environment.is_used:
                findings.skip("episodes", "rollouts of the trial are one answer each")
            await _try(config, inputs[0], findings)
    if findings.failed:
        raise ValueError(
            f"all checks must pass, got {len(findings.failed)} that did not: "
            f"{', '.join(findings.failed)}"
        )


def check_torch(config: Config) -> str:
    """The version of torch; ValueError if it is built for CPUs alone and the recipe needs GPUs."""
    version = metadata.version("torch")
    is_able = not (needs_gpu(config) and version.endswith("+cpu"))
    require(
        is_able,
        "torch",
        "be a build for GPUs (pip install torch, without an index of CPU builds)",
        version,
    )
    return version


async def _try(config: Config, inputs: Inputs, findings: Findings) -> None:
    from llamarl.cli.check_trial import (
        CpuReference,  # torch, which the checks before spare
        Trial,
        tiny_config,
        write_tiny_checkpoint,
    )

    beside = Path(os.path.abspath(config.run_dir)).parent  # all hosts of a run have it
    is_new = not beside.exists()
    beside.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="check-", dir=beside)
    try:
        checkpoint = write_tiny_checkpoint(config, inputs, Path(folder))
        tiny = tiny_config(config, checkpoint, inputs.tokenizer_folder)
        await Trial(tiny, CpuReference(checkpoint, tiny), findings).run(folder)
    finally:
        shutil.rmtree(beside if is_new else folder, ignore_errors=True)
