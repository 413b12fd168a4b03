"""The reference of the config: every key with its type, default, limits and meaning.

Owns: the description of each key, and which key an unknown name probably stands for. Does not own:
fields, defaults or meanings, which are taken from the dataclasses and the texts under their fields.
Invariant: standard library and YAML only, so help costs milliseconds.
"""

import ast
import dataclasses
import difflib
import inspect
import shutil
import textwrap
import typing
from collections.abc import Mapping
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any

import yaml

from llamarl import config
from llamarl.config.check import did_you_mean, limits_of

ELSEWHERE = {
    "run_dir": "output_dir default_local_dir logging_dir",
    "num_steps": "max_steps total_training_steps num_train_steps train_steps",
    "num_epochs": "num_train_epochs total_epochs",
    "max_hours": "max_time max_walltime",
    "model.checkpoint": "model_name_or_path model_path model_id pretrained path",
    "model.tokenizer": "tokenizer_path tokenizer_name_or_path",
    "data.prompts": "train_files train_file train_dataset dataset dataset_name",
    "data.held_out": "val_files eval_dataset eval_file test_files",
    "data.prompt_field": "prompt_key prompt_column",
    "reward.answer_field": "answer_key ground_truth_key label_key",
    "data.chat": "apply_chat_template chat_template",
    "data.system": "system_prompt",
    "data.max_prompt_tokens": "max_prompt_length max_prompt_len",
    "data.overlong": "filter_overlong_prompts truncation too_long",
    "data.chat_template_kwargs": "apply_chat_template_kwargs",
    "data.repeat_share": "curriculum",
    "data.weights": "interleave_datasets interleave_probs probabilities",
    "reward": "reward_funcs reward_fn_key reward_fn custom_reward_function reward_function",
    "reward.weights": "reward_weights",
    "environment.tools": "environment_factory tool_config_path rollout_func",
    "environment.calls": "tool_parser tool_call_parser",
    "environment.max_turns": "max_tool_calling_iterations max_assistant_turns",
    "algorithm": "loss_type adv_estimator policy_loss loss_mode importance_sampling_level",
    "algorithm.advantage": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.normalization": "loss_agg_mode loss_reduction",
    "algorithm.kl_coefficient": "beta kl_coef kl_loss_coef kl_penalty_coef",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty use_bias_correction_kl",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
    "algorithm.filters": "filter_groups dynamic_sampling",
    "algorithm.overlong_penalty_tokens": "overlong_buffer overlong_buffer_len soft_punish_cache",
    "algorithm.mask_truncated": "mask_truncated_completions overlong_filtering",
    "algorithm.rho": "importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold "
    "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low eps_clip cliprange",
    "algorithm.clip_ratio_c": "delta",
    "algorithm.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "sampling.rollouts_per_prompt": "num_generations n n_samples_per_prompt group_size num_samples",
    "sampling.max_tokens": "max_completion_length max_response_length max_new_tokens",
    "sampling.stop_strings": "stop stop_words",
    "generator": "use_vllm rollout_backend inference_engine actor_rollout_ref.rollout.name",
    "generator.num_ranks": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "generator.num_replicas": "num_engines rollout_num_engines vllm_num_engines",
    "generator.max_num_seqs": "max_running_requests",
    "generator.max_model_len": "vllm_max_model_length max_seq_len",
    "generator.kv_cache_bytes": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "trainer.groups_per_step": "train_batch_size batch_size rollout_batch_size ppo_mini_batch_size "
    "per_device_train_batch_size generation_batch_size global_batch_size",
    "trainer.tokens_per_micro_batch": "ppo_max_token_len_per_gpu max_tokens_per_gpu "
    "ppo_micro_batch_size_per_gpu micro_batch_size gradient_accumulation_steps",
    "trainer.compute_dtype": "bf16 mixed_precision param_dtype torch_dtype",
    "trainer.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "trainer.lr": "learning_rate actor_lr",
    "trainer.betas": "adam_beta1 adam_beta2",
    "trainer.eps": "adam_epsilon adam_eps",
    "trainer.warmup_steps": "lr_warmup_steps num_warmup_steps",
    "trainer.schedule": "lr_scheduler_type lr_scheduler warmup_style",
    "trainer.min_lr_share": "min_lr_ratio",
    "trainer.max_grad_norm": "grad_clip clip_grad clip_grad_norm",
    "trainer.reshard_after": "reshard_after_forward",
    "trainer.replicate": "dp_replicate hsdp_replicate",
    "staleness.max_staleness": "max_head_offpolicyness staleness_threshold max_off_policy_steps "
    "max_async_level steps_per_generation",
    "placement.colocated": "colocate vllm_mode colocate_all hybrid_engine",
    "cluster.num_hosts": "nnodes num_nodes",
    "cluster.num_gpus_per_host": "n_gpus_per_node num_gpus_per_node gpus_per_node",
    "evaluation.every_steps": "eval_steps test_freq eval_interval",
    "checkpoint.every_steps": "save_steps save_freq save_interval",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep",
    "checkpoint.resume": "resume_from_checkpoint resume_mode",
    "metrics.trackers": "report_to logger",
    "experience.keep_rollouts": "log_completions rollout_data_dir validation_data_dir",
    "metrics.sample_rollouts": "num_completions_to_print",
}
"""Keys and groups, and the names of the same in TRL, verl and others."""
NOT_HERE = {
    "a batch is always trained in one optimizer step": "num_iterations ppo_epochs",
    "all weights are trained, there are no adapters": "lora peft lora_rank lora_alpha lora_r "
    "lora_target_modules lora_dropout use_peft peft_config lora_adapter_path",
    "a group's mean reward is the baseline, there is no critic": "critic value_model vf_coef "
    "cliprange_value gae_lambda lam gamma",
}
"""Why there is no such key, and the names in TRL, verl and others."""

TYPES = {
    Any: "str|list[str]",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    type(None): "null",
}
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "bool|null": "true, false or null",
    "str|null": "text or null",
    "list[str]": "a list of texts",
    "str|list[str]": "text or a list of texts",
    "list[float]": "a list of numbers",
    "list[int]": "a list of whole numbers",
    "section": "keys with their values",
}
"""What a value of each type is called in an error."""
WIDTH = 100
INDENT = "    "


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value of a group: the dataclass it selects, and the fields that it sets."""

    section: type
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a recipe: `choices` of its group have it, with `defaults` that may differ."""

    name: str
    type: str
    limits: str
    meaning: str
    defaults: Mapping[str, str]
    choices: tuple[str, ...]
    is_everywhere: bool

    @property
    def default(self) -> str:
        """The default, of the first choice that has it."""
        return next(iter(self.defaults.values()))

    def line(self) -> str:
        """Key, type, default and first sentence, each in its column."""
        sentence = self.meaning.partition(". ")[0].rstrip(".:") + "."
        return f"{self.name:<36}{self.type:<12}{self.default:<14} {sentence}"

    def text(self) -> str:
        """Its whole description, as an indented paragraph under its name."""
        others: dict[str, list[str]] = {}
        for choice, value in self.defaults.items():
            if value != self.default:
                others.setdefault(value, []).append(choice)
        facts = f"{self.type}{self.limits}, default {self.default}"
        if others:
            differing = [f"{', '.join(names)}: {value}" for value, names in others.items()]
            facts += f" ({'; '.join(differing)})"
        if not self.is_everywhere:
            facts += f"; only with {self.name.partition('.')[0]}={'|'.join(self.choices)}"
        paragraphs = [facts, self.meaning]
        if self.name in ELSEWHERE:
            paragraphs.append("elsewhere: " + ", ".join(ELSEWHERE[self.name].split()))
        return "\n".join([self.name, *(_indented(each) for each in paragraphs)])


class KeyReference:
    """All sections, groups and keys of a recipe."""

    def __init__(self, root: Path, groups: Mapping[str, Mapping[str, Choice]]) -> None:
        """`root` is the file that selects a choice of each group; `groups` holds the choices."""
        hints: dict[str, Any] = typing.get_type_hints(config.Config)
        sections: dict[str, Any] = {
            name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
        }
        self._scalars = [name for name in hints if name not in sections]
        self._composed = yaml.safe_load(root.read_text())
        selected = _selected(self._composed["defaults"])
        self.groups = {
            name: {selected[name]: choices[selected[name]], **choices}  # the default first
            for name, choices in groups.items()
        }
        self.sections: dict[str, dict[str, Choice]] = {
            name: self.groups.get(name, {"": Choice(kind)}) for name, kind in sections.items()
        }

    @cached_property
    def keys(self) -> dict[str, Key]:
        """Every key by its name, in the order of the dataclasses."""
        root = {"": Choice(config.Config)}
        found = {name: self._key("", name, root) for name in self._scalars}
        for section, choices in self.sections.items():
            names = [name for each in choices.values() for name in _fields(each.section)]
            for name in dict.fromkeys(names):
                key = self._key(section, name, choices)
                found[key.name] = key
        return found

    def _key(self, section: str, name: str, choices: Mapping[str, Choice]) -> Key:
        having = {c: each for c, each in choices.items() if name in _fields(each.section)}
        kind = next(iter(having.values())).section
        fields = {choice: _fields(each.section)[name] for choice, each in having.items()}
        defaults = {choice: _as_yaml(_default(field)) for choice, field in fields.items()}
        if not section:
            defaults = {"": self._composed.get(name, defaults[""])}
        return Key(
            name=f"{section}.{name}".lstrip("."),
            type=_type_words(typing.get_type_hints(kind)[name]),
            limits=_limit_words(kind, name),
            meaning=_meaning(kind, name),
            defaults=defaults,
            choices=tuple(having),
            is_everywhere=len(having) == len(choices),
        )

    def overview(self, width: int | None = None) -> str:
        """One line per key, then names in other projects; at most `width` characters in each."""
        lines = [key.line() for key in self.keys.values()]
        lines += ["", "groups, chosen by GROUP=CHOICE (the first is the default):"]
        lines += [f"{name:<14}{' | '.join(choices)}" for name, choices in self.groups.items()]
        lines += ["", "names elsewhere (TRL, verl and others), and the key that means the same:"]
        for key, names in ELSEWHERE.items():
            lines += [f"{name:<36}{key}" for name in names.split()]
        lines += [
            "",
            "A step trains trainer.groups_per_step x sampling.rollouts_per_prompt rollouts, which "
            "is what a batch size in completions counts.",
            "llamarl config KEY describes a key or a section.",
        ]
        return "".join(f"{line[:width]}\n" for line in lines)

    def everything(self) -> str:
        """The whole text of all groups, sections and keys."""
        groups = [f"  {name:<12}{' | '.join(choices)}" for name, choices in self.groups.items()]
        texts = [
            "\n".join(["groups, chosen by GROUP=CHOICE (the first is the default):", *groups]),
            "keys, set by KEY=VALUE:",
            *(self.keys[name].text() for name in self._scalars),
            *map(self._section_text, self.sections),
        ]
        return "\n\n".join(texts) + "\n"

    def about(self, name: str) -> str:
        """The text of a key, a section, a last part of keys, or a name from elsewhere, for which it
        may be the reason that no key does it; ValueError for any other."""
        if name in self.keys:
            return self.keys[name].text()
        if name in self.sections:
            return self._section_text(name)
        if reason := self.reason_without(name):
            return f"{name}\n{_indented(f'No key here: {reason}.')}"
        if meant := _elsewhere(name) or self._with_leaf(name):
            return "\n\n".join(map(self.about, meant))
        must = "KEY must be one that `llamarl config` lists"
        raise ValueError(f"{must}, got {name!r}{did_you_mean(self.meant_by(name))}")

    def reason_without(self, name: str) -> str | None:
        """Why nothing here does what `name` does elsewhere; None where that is not known."""
        words = {*name.split(".")}
        found = (reason for reason, names in NOT_HERE.items() if words & {*names.split()})
        return next(found, None)

    def _with_leaf(self, name: str) -> list[str]:
        """The keys whose last part is that of `name`, unless its first part is a section here."""
        section, _, leaf = name.rpartition(".")
        if section.partition(".")[0] in self.sections:
            return []
        return [key for key in self.keys if key.rpartition(".")[2] == leaf]

    def _section_text(self, name: str) -> str:
        choices = self.sections[name]
        base = typing.get_type_hints(config.Config)[name]
        lines = [f"== {name}: {_summary(base)}"]
        for choice, each in choices.items() if name in self.groups else ():
            sets = ", ".join(f"{key}: {_as_yaml(value)}" for key, value in each.values.items())
            said = _summary(each.section) if each.section is not base else ""
            words = f"{name}={choice}  {said}{f' Sets {sets}.' if sets else ''}"
            lines.append(_indented(words.strip()))
        head = "\n".join(lines)
        keys = [key.text() for key in self.keys.values() if key.name.startswith(f"{name}.")]
        return "\n\n".join([head, *keys])

    def meant_by(self, name: str) -> list[str]:
        """The keys or groups that the unknown `name` may stand for, likeliest first."""
        leaf = name.rpartition(".")[2]
        if known := _elsewhere(name):
            return known
        same = [key for key in self.keys if key.rpartition(".")[2] == leaf and key != name]
        if same:
            return same[:3]
        close = difflib.get_close_matches(name, [*self.keys, *self.sections], n=1, cutoff=0.8)
        leaves = {key.rpartition(".")[2]: key for key in reversed(self.keys)}
        near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        return close or [leaves[each] for each in near]


def _elsewhere(name: str) -> list[str]:
    """The key that a name from elsewhere stands for, in full or by its last part; or none."""
    for words in (name, name.rpartition(".")[2]):
        if known := [key for key, names in ELSEWHERE.items() if words in names.split()]:
            return known
    return []


def _meaning(section: type, name: str) -> str:
    """The text under a field, of this class or of one that it inherits from."""
    classes = [each for each in section.__mro__ if each is not object]
    texts = (_documents(inspect.getfile(each))[each.__name__].get(name) for each in classes)
    return next((text for text in texts if text), "")


@cache
def _documents(path: str) -> dict[str, dict[str, str]]:
    """Class -> field -> the text under it, as one line, of all classes in a file."""
    body = ast.parse(Path(path).read_text()).body
    return {node.name: _field_texts(node.body) for node in body if isinstance(node, ast.ClassDef)}


def _field_texts(body: list[ast.stmt]) -> dict[str, str]:
    texts = {}
    for item, after in pairwise(body):
        match item, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                texts[name] = " ".join(str(text).split())
    return texts


def _selected(entries: list[Any]) -> dict[str, str]:
    """The choice of each group in a list of Hydra's defaults."""
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {name: choice for name, choice in pairs if not name.startswith("override ")}


def _fields(section: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(section)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _type_words(hint: Any) -> str:
    if typing.get_origin(hint) is UnionType:
        return "|".join(map(_type_words, typing.get_args(hint)))
    if typing.get_origin(hint) is dict:
        return "section"
    if typing.get_origin(hint) is list:
        return f"list[{_type_words(typing.get_args(hint)[0])}]"
    return TYPES[hint]


def _limit_words(section: type, name: str) -> str:
    limits = limits_of(section, name)
    if "most" not in limits:
        return ""
    words = "from" if "least" in limits else "above"
    lowest = limits.get("least", limits.get("above"))
    return f" {words} {lowest:.16g} to {limits['most']:.16g}"


def _summary(section: type) -> str:
    return " ".join((section.__doc__ or "").split())


def _indented(text: str) -> str:
    width = min(WIDTH, max(40, shutil.get_terminal_size((WIDTH, 24)).columns))
    return textwrap.fill(
        text,
        width,
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
