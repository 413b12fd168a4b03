"""Families that we have no code of: with that of transformers and of vLLM each trains a step and
writes with what came of it, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.controller.logprob_check import LARGEST_FLOAT32_MEDIAN, NUM_TOKENS
from llamarl.core.config import TransformersConfig
from llamarl.model.attention import ModelInputs, make_packing
from llamarl.trainer.parallel import load_model
from tests.tiny_checkpoints import write_reference
from tests.trainer.ranks import Ranks
from tests.uneven_publish import publish
from tests.vllm.checkpoints import SIZES, TOLERANCE
from tests.vllm.engines import commit, drain, make_engine, request

pytestmark = pytest.mark.vllm

LENGTHS = [40, 6, 30]  # longer and shorter than the windows
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GROUPED = {  # of DeepSeek's kind
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SHARED = {"shared_expert_intermediate_size": 64}
TIED = {"tie_word_embeddings": True}
TRAINS: dict[str, dict[str, Any]] = {
    "gemma2": WINDOWS | TIED,
    "gemma3_text": WINDOWS | TIED | {"query_pre_attn_scalar": 32},
    "glm4": {"pad_token_id": 0},
    "qwen2_moe": MIXTURE | SHARED,
    "qwen3_next": MIXTURE | SHARED | LINEAR,
    "mistral": {},
    "ministral3": {},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "granite": {},
    "exaone4": WINDOWS,
    "ernie4_5": {},
    "olmo3": WINDOWS,
    "smollm3": {"pad_token_id": 0},
    "seed_oss": {"pad_token_id": 0},
    "hunyuan_v1_dense": {},
    "stablelm": {},
    "nemotron": {},
    "starcoder2": {},
}
"""By model_type what the configs of families that train have beside SIZES."""
SLOW = (
    "mistral",
    "phi",
    "olmo2",
    "ministral3",
    "stablelm",
    "nemotron",
    "starcoder2",
    "seed_oss",
    "hunyuan_v1_dense",
)
LINEAR_KIND = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DTYPES = dict.fromkeys(LINEAR_KIND, "bfloat16")  # in which alone vLLM has linear attention on CPUs
MEDIANS = {"qwen3_next": 0.2, "gemma2": 1e-3}
"""The largest median of differences where vLLM rounds: in bfloat16, also in routers, or in the cap
of attention scores."""
DIFFERS: dict[str, dict[str, Any]] = {
    "cohere2": WINDOWS | TIED | {"logit_scale": 1.0, "pad_token_id": 0},
    "deepseek_v2": GROUPED | LATENT,
}
"""Of families whose log-probs, of vLLM alone, are not those of transformers."""
BUFFER = "must have nothing in its files but parameters, which are trained, got"
LOADER = "vLLM's loader must only copy weights, got more for"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "gemma4_text": (WINDOWS, f"a gemma4_text {BUFFER} .*layer_scalar", LOADER),
    "glm4_moe": (GROUPED, f"a glm4_moe {BUFFER} .*e_score_correction_bias", ""),
    "deepseek_v3": (GROUPED | LATENT, f"a deepseek_v3 {BUFFER} .*e_score_correction_bias", ""),
    "gpt_oss": (
        WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "",
        f"{LOADER} .*experts",
    ),
    "falcon_h1": (
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16},
        "",
        f"{LOADER} .*mamba",
    ),
    "phi": ({"pad_token_id": 0}, "", f"{LOADER} lm_head.bias"),
    "granitemoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "experts.down_proj", ""),
    "qwen3_5_text": (LINEAR, "", "vLLM cannot run .*torchvision"),
    "qwen3_5_moe_text": (LINEAR | MIXTURE | SHARED, "", "vLLM cannot run .*torchvision"),
}
"""By model_type the same, and how trainer and vLLM refuse it (empty: that side does not)."""


@pytest.fixture(scope="module")
def engines() -> Iterator[Ranks]:
    """A process for vLLM, which changes classes of transformers where it is imported."""
    made = Ranks(1)
    yield made
    made.close()


async def write(
    rank: int, num_ranks: int, folder: str, weights: dict[str, torch.Tensor], dtype: str
) -> list[tuple[list[int], int, torch.Tensor]] | str:
    """Rollouts by vLLM after a publish of `weights`: ids, those of the prompt, log-probs; or why it
    refuses the checkpoint."""
    try:
        engine = make_engine(folder, dtype=dtype)
    except ValueError as error:  # and nothing of the engine is left
        return str(error)
    try:
        commit(engine, folder, 0)
        (flat,) = publish([engine.memory], weights)
        engine.commit(engine.process_weights(flat), 1)
        for row in range(4):
            engine.submit(request(row, tuple(range(5, 12 + 9 * row)), max_tokens=20))
        items = drain(engine).values()
        return [
            (
                [*item.request.prompt_ids, *item.written.ids.tolist()],
                len(item.request.prompt_ids),
                torch.from_numpy(item.written.logprobs),
            )
            for item in items
        ]
    finally:
        engine.close()


def write_family(folder: Path, family: str, sizes: dict[str, Any]) -> Any:
    """Write a checkpoint; transformers' model."""
    return write_reference(folder, family, **(SIZES | {"hidden_size": 128} | sizes))


def load(folder: Path) -> Any:
    """The trainer's model of a checkpoint."""
    return load_model(str(folder), TransformersConfig(), torch.device("cpu"), None, torch.float32)


def check_trainer(model: Any, library: Any, inputs: ModelInputs) -> torch.Tensor:
    """The trainer's log-probs, which are those of transformers for each rollout alone."""
    logprobs = model(inputs, 1.0).logprobs
    ids, targets = inputs.token_ids.split(LENGTHS), inputs.targets.split(LENGTHS)
    for part, target, found in zip(ids, targets, logprobs.split(LENGTHS), strict=True):
        wanted = library(input_ids=part[None], use_cache=False).logits[0].log_softmax(-1)
        wanted = wanted.gather(1, target[:, None])[:, 0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    return logprobs


def some_inputs() -> ModelInputs:
    torch.manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (2, sum(LENGTHS)))
    return ModelInputs(ids[0], make_packing(LENGTHS), ids[1])


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in TRAINS]
)
def test_a_family_trains_a_step_and_vllm_writes_with_it(
    engines: Ranks, family: str, tmp_path: Path
) -> None:
    library = write_family(tmp_path, family, TRAINS[family])
    model, inputs = load(tmp_path), some_inputs()
    before = check_trainer(model, library, inputs)
    before.mean().neg().backward()
    parameters = dict(model.named_parameters())
    assert all(each.grad is not None for each in parameters.values())
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    torch.optim.SGD(parameters.values(), lr=0.3).step()
    assert model(inputs, 1.0).logprobs.mean() > before.mean() + 0.01

    weights = {name: each.detach() for name, each in parameters.items()}
    (rollouts,) = engines.run(write, str(tmp_path), weights, DTYPES.get(family, "float32"))
    apart = differences(model, rollouts)
    if family in MEDIANS:
        assert apart.median() < MEDIANS[family]
    else:
        assert apart.max() < 2 * TOLERANCE


def differences(model: Any, rollouts: list[tuple[list[int], int, torch.Tensor]]) -> torch.Tensor:
    """Of all tokens' log-probs, vLLM's from the trainer's."""
    assert not isinstance(rollouts, str), rollouts
    found = []
    for tokens, num_prompt, logprobs in rollouts:
        fed, targets = torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])
        mine = model(ModelInputs(fed, make_packing([len(fed)]), targets), 1.0).logprobs
        found.append((mine[num_prompt - 1 :] - logprobs).abs())
    return torch.cat(found)


@pytest.mark.parametrize("family", DIFFERS)
def test_a_family_that_vllm_computes_otherwise_is_found_by_the_check_of_log_probs(
    engines: Ranks, family: str, tmp_path: Path
) -> None:
    library = write_family(tmp_path, family, DIFFERS[family])
    model = load(tmp_path)
    check_trainer(model, library, some_inputs())
    weights = {name: each.detach() for name, each in library.named_parameters()}
    (rollouts,) = engines.run(write, str(tmp_path), weights, "float32")
    largest = [differences(model, [rollout])[:NUM_TOKENS].max() for rollout in rollouts]
    assert torch.stack(largest).median() > LARGEST_FLOAT32_MEDIAN


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_not_train_is_refused_by_name(
    engines: Ranks, family: str, tmp_path: Path
) -> None:
    sizes, by_trainer, by_vllm = REFUSED[family]
    library = write_family(tmp_path, family, sizes)
    if by_trainer:
        with pytest.raises(ValueError, match=by_trainer) as refused:
            load(tmp_path)
        assert "\n" not in str(refused.value)
    else:
        check_trainer(load(tmp_path), library, some_inputs())
    if by_vllm:
        dtype = DTYPES.get(family, "float32")
        (words,) = engines.run(write, str(tmp_path), {}, dtype)
        assert isinstance(words, str)
        assert re.search(by_vllm, words), words
        assert "\n" not in words
