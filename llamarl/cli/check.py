"""The command `llamarl check`: it leaves no process and no file behind."""

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
from llamarl.recipe.prompt_inputs import refuse_sft


async def check(config: Config, console: Console) -> None:
    """Say on `console` which parts of the recipe work on this machine. ValueError at the end if
    checks failed, which names them."""
    findings = Findings(console)
    inputs: list[Inputs] = []

    def read() -> str:
        refuse_sft(config, "llamarl check")
        inputs.append(read_inputs(config))
        found = inputs[0]
        return f"{found.architecture.model_type}, {len(found.prompts)} prompts"

    def fit() -> str:
        check_fit(config, inputs[0].architecture, read_frozen(config, inputs[0].graph))
        return "by forecast, all that the recipe needs fits (llamarl plan says more)"

    def torch() -> str:
        version = metadata.version("torch")
        must = "be a build for GPUs (pip install torch, without an index of CPU builds)"
        require(not (needs_gpu(config) and version.endswith("+cpu")), "torch", must, version)
        return version

    findings.ask("recipe", read)
    findings.ask("torch", torch)
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
        got = f"{len(findings.failed)} that did not: {', '.join(findings.failed)}"
        raise ValueError(f"all checks must pass, got {got}")


async def _try(config: Config, inputs: Inputs, findings: Findings) -> None:
    # Imports torch, which the checks before spare.
    from llamarl.cli.check_trial import Trial, tiny_config, write_tiny_checkpoint

    beside = Path(os.path.abspath(config.run_dir)).parent  # all hosts of a run have it
    is_new = not beside.exists()
    beside.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="check-", dir=beside)
    try:
        checkpoint = write_tiny_checkpoint(config, inputs, Path(folder))
        tiny = tiny_config(config, checkpoint, inputs.tokenizer_folder)
        await Trial(tiny, findings).run(folder)
    finally:
        shutil.rmtree(beside if is_new else folder, ignore_errors=True)
