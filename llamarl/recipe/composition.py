"""A recipe's folder and the arguments are composed into a checked `Config`, and a mistake is found
in its files."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from llamarl.core.config import Config
from llamarl.core.config.generator import alone, named, pools_of
from llamarl.core.config.rank_assignment import assign
from llamarl.core.fields import did_you_mean, require, wrong_choice
from llamarl.publish.transports.routes import check_transport
from llamarl.recipe.choices import CHOICES, chosen, settle, written_choices
from llamarl.recipe.reference import WANTED, KeyReference
from llamarl.scoring.rewards import check_rewards
from llamarl.scoring.samplers import check_sampler
from llamarl.trainer.advantages import check_names

MULTIRUN_FLAGS = {"--multirun", "-m"}
VALUE_FLAGS = (("--cfg", "-c"), ("--config-dir", "-cd"), ("--config-name", "-cn"))
SHOWN = "job"  # what --cfg prints: the composed recipe


def divide(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return Hydra's options, and the overrides. ValueError for an unknown option, one without its
    value, another value of --cfg than job, or --cfg with --multirun."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in VALUE_FLAGS:
        parser.add_argument(*names)
    parser.add_argument("--multirun", "-m", action="store_true")
    try:
        options, overrides = parser.parse_known_args(arguments)
    except ArgumentError as error:
        name = str(error.argument_name).partition("/")[0]
        must = "come without a value" if name in MULTIRUN_FLAGS else "come with a value, got none"
        raise ValueError(f"{name} must {must}") from error
    if unknown := [each for each in overrides if each.startswith("-")]:
        known = "--cfg, --config-dir, --config-name, --multirun"
        raise ValueError(f"an option must be one of {known}, got {unknown[0]!r}")
    if options.cfg is not None:
        require(options.cfg == SHOWN, "--cfg", f"be {SHOWN}", options.cfg)
        require(not options.multirun, "--cfg", "come without --multirun", "both")
    return options, overrides


def _places(options: Namespace) -> list[str]:
    """Return the options that say where the recipe is."""
    named = [] if options.config_name is None else ["--config-name", options.config_name]
    return ["--config-dir", options.config_dir, *named]


def syntax_error(error: yaml.YAMLError, name: str) -> str:
    """Return one line about what is no YAML, in the file that the error names, or in `name`."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{name} must be YAML, got {' '.join(str(error).split())}"
    path = mark.name if Path(mark.name).is_file() else name
    mistake = f"a mistake at column {mark.column + 1}: {getattr(error, 'problem', '')}"
    return f"{path}:{mark.line + 1}: must be YAML, got {mistake}"


def place_of(recipe: Path, key: str) -> str:
    """Return `FILE:LINE: ` of a key in the files of a recipe's folder, or nothing."""
    others = sorted(path for path in recipe.parent.glob("*/*.yaml"))
    for path in (recipe, *others):
        group = path.relative_to(recipe.parent).parent.parts
        names = [name.partition("[")[0] for name in key.split(".")]
        if tuple(names[: len(group)]) == group and (line := _line_of(path, names[len(group) :])):
            return f"{path}:{line}: "
    return ""


def _line_of(path: Path, keys: list[str]) -> int | None:
    """Return the line, from 1, of the nested `keys` in a YAML file."""
    try:
        node: yaml.Node | None = yaml.compose(path.read_text("utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # not the file that Hydra read
        return None
    line = None
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(name, value) for name, value in pairs if name.value == key]
        if not found:
            return None
        name, node = found[-1]
        line = name.start_mark.line + 1
    return line


def place_with(recipe: Path | None, word: str) -> str:
    """Return `FILE:LINE: ` of the first line of the recipe with this word, or nothing."""
    lines = recipe.read_text("utf-8").splitlines() if recipe is not None else []
    found = [i for i, line in enumerate(lines, 1) if re.search(rf"\b{re.escape(word)}\b", line)]
    return f"{recipe}:{found[0]}: " if found else ""


SPECIFIC = (OmegaConfBaseException, OverrideParseException, MissingConfigException, yaml.YAMLError)
WITHOUT_CONFIG = "defaults must begin with config, as in `defaults: [config, _self_]`"
CONF_FOLDER = Path(__file__).resolve().parent.parent / "conf"
OWN_NAME = "config"  # of the file in CONF_FOLDER
RECIPE_FILE = "run.yaml"  # of a recipe's folder


@cache
def store_choices() -> None:
    """Register the choices, and the dataclass of a whole recipe, with Hydra; once."""
    store = ConfigStore.instance().store
    whole = OmegaConf.structured(Config)
    OmegaConf.set_struct(whole.evaluation.sets, False)  # its keys are the recipe's own
    store(name="schema", node=whole, provider="llamarl")
    for group, choices in CHOICES.items():
        for name, choice in choices.items():
            node = OmegaConf.merge(OmegaConf.structured(choice.section), dict(choice.values))
            assert isinstance(node, DictConfig)
            for value in node.values():
                if isinstance(value, DictConfig) and OmegaConf.get_type(value) is dict:
                    OmegaConf.set_struct(value, False)  # its keys are the recipe's own
            store(name=name, group=group, node=node, provider="llamarl")


def for_each_config(
    program: str, arguments: list[str], work: Callable[[DictConfig, str], None]
) -> None:
    """Call `work` with the composed recipe and its run folder; once per combination of a multirun.
    With --cfg, print the recipe instead.

    `program` is the command that the arguments follow. ValueError for a recipe or arguments that
    do not compose, OSError for a run folder that cannot be made.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises errors instead of printing them
    store_choices()
    options, overrides = divide(arguments)
    recipe = _recipe(options)
    flags = [*_places(options), *(["--multirun"] if options.multirun else [])]
    if options.cfg is not None:
        overrides, work = [*overrides, "hydra.run.dir=."], _show
    sys.argv = [program, *flags, f"recipe_dir={_quoted(_folder_of(recipe))}", *overrides]
    warnings.filterwarnings("ignore", message=".*missing `_self_`")  # its own values win
    entry = hydra.main(version_base="1.3", config_path=str(CONF_FOLDER), config_name="run")
    try:
        _check_groups(overrides)
        entry(lambda composed: work(_with_choices(composed, recipe), _run_dir()))()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(_explain(error, recipe)) from error


def compose(
    folder: str | Path, overrides: Sequence[str], run_dir: str | Path | None = None
) -> DictConfig:
    """Return the recipe in `folder` with these overrides, as the command line composes it; for code
    that may itself run under Hydra, and makes no folder. ValueError for what does not compose."""
    flags = [each for each in overrides if each.startswith("-")]
    require(not flags, "overrides", "be KEY=VALUE each", flags[0] if flags else None)
    recipe = recipe_file(["--config-dir", str(folder)])
    store_choices()
    places = [f"recipe_dir={_quoted(_folder_of(recipe))}"]
    places += [] if run_dir is None else [f"run_dir={_quoted(Path(run_dir))}"]
    try:
        _check_groups(overrides)
        place = hydra.initialize_config_dir(str(CONF_FOLDER), version_base="1.3")
        with place, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*missing `_self_`")
            _search_too(recipe.parent)
            composed = hydra.compose(recipe.stem, [*places, *overrides])
            return _with_choices(composed, recipe, overrides)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(_explain(error, recipe)) from error


@cache
def reference() -> KeyReference:
    """Return the reference of every key and group of a recipe."""
    return KeyReference(CONF_FOLDER / f"{OWN_NAME}.yaml", CHOICES)


def _show(composed: DictConfig, run_dir: str) -> None:
    sys.stdout.write(to_yaml(composed))


def _with_choices(
    composed: DictConfig, recipe: Path, arguments: Sequence[str] | None = None
) -> DictConfig:
    """Settle the choices in `composed`; without `arguments` they are those of the present job."""
    if arguments is None:
        arguments = HydraConfig.get().overrides.task
    parsed = OverridesParser.create().parse_overrides([*arguments])
    defaults = {group: next(iter(choices)) for group, choices in reference().groups.items()}
    settle(
        composed, {e.key_or_group: e.value() for e in parsed}, defaults | written_choices(recipe)
    )
    return composed


def _folder_of(recipe: Path) -> Path:
    """Return where relative paths of a recipe start: at its folder, or at that which its file
    names, as the config.yaml of a run does."""
    own = yaml.safe_load(recipe.read_text("utf-8")).get("recipe_dir")
    return recipe.parent / own if isinstance(own, str) else recipe.parent


def _search_too(folder: Path) -> None:
    """Let the Hydra that is initialized look into this folder after its own, as it does with
    --config-dir: the folder of a run has a config.yaml too."""
    places = create_config_search_path(str(folder.resolve()))
    places.prepend("llamarl", f"file://{CONF_FOLDER}")
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("llamarl", places)


def _quoted(folder: Path) -> str:
    return "'{}'".format(str(folder.resolve()).replace("'", "\\'"))


def arguments_of_job(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that do the present job of a multirun alone."""
    chosen = HydraConfig.get().overrides.task
    kept = [each for each in chosen if not each.startswith(("recipe_dir=", "run_dir="))]
    return [*_places(divide(arguments)[0]), *kept, f"run_dir={_quoted(Path(_run_dir()))}"]


def _run_dir() -> str:
    return os.path.abspath(HydraConfig.get().runtime.output_dir)


def to_config(composed: DictConfig) -> Config:
    """Return the dataclasses of a composed recipe, all checks run; ValueError for one that
    fails."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error, None)) from error
    if not isinstance(config, Config):
        raise ValueError(WITHOUT_CONFIG)
    _refuse_added("", config)
    check_names(config.algorithm)
    check_rewards(config.reward)
    for pool in pools_of(config.generator):
        with named(pool):
            check_transport(alone(config, pool))
    if config.cluster.sites or config.generator.pools:
        assign(config)
    check_sampler(config)
    return config


def _refuse_added(key: str, section: object) -> None:
    """Raise a ValueError for a key that Hydra's "+key=value" added to a section, or to one in
    it."""
    if not dataclasses.is_dataclass(section) or isinstance(section, type):
        return
    known = {field.name for field in dataclasses.fields(section)}
    for name, value in vars(section).items():
        full = f"{key}.{name}".lstrip(".")
        if name not in known:
            raise ValueError(_unknown_key(full, type(section).__name__))
        _refuse_added(full, value)


def to_yaml(composed: DictConfig, values: Mapping[str, Any] | None = None) -> str:
    """Return the composed recipe as a recipe of one file: the choice of each group, then every
    value spelt out, some with other `values`. It leaves open where its run's folder is."""
    written = composed.copy()
    for key, value in (values or {}).items():
        OmegaConf.update(written, key, value)
    kinds = {group: OmegaConf.get_type(composed[group]) for group in CHOICES}
    own = [{f"override /{group}": name} for group, name in chosen(kinds, composed).items()]
    resolved = OmegaConf.to_container(written, resolve=True)
    assert isinstance(resolved, dict)
    resolved.pop("run_dir")
    return OmegaConf.to_yaml(OmegaConf.create({"defaults": [OWN_NAME, *own, "_self_"], **resolved}))


def as_argument(key: str, value: str | list[str] | dict[str, str]) -> str:
    """Return the argument that gives the key this value on the command line."""
    if isinstance(value, dict):
        return f"{key}={{{','.join(f'{name}:{text}' for name, text in value.items())}}}"
    return f"{key}=[{','.join(value)}]" if isinstance(value, list) else f"{key}={value}"


def recipe_file(arguments: Sequence[str]) -> Path:
    """Return the file that the arguments of a command name; ValueError unless it is YAML."""
    return _recipe(divide(arguments)[0])


def _recipe(options: Namespace) -> Path:
    if options.config_dir is None:
        raise ValueError("--config-dir must name a recipe's folder, such as recipes/quickstart")
    folder = Path(options.config_dir)
    if not folder.is_dir():
        raise ValueError(f"--config-dir must be a recipe's folder, got {str(folder)!r}")
    recipe = folder / f"{(options.config_name or RECIPE_FILE).removesuffix('.yaml')}.yaml"
    must = "be another name than config, which llamarl's own file has"
    more = " (the folder of a run is a recipe without it)"
    require(recipe.stem != OWN_NAME, "--config-name", must + more, OWN_NAME)
    if not recipe.is_file():
        raise ValueError(f"--config-dir must hold {recipe.name}, got {str(folder)!r} without")
    try:
        node = yaml.compose(recipe.read_text("utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"{recipe} must be a file that can be read, got {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{recipe} must be UTF-8 text, got {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(syntax_error(error, str(recipe))) from error
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{recipe} must hold keys with their values, got none")
    return recipe


def _check_groups(overrides: Sequence[str]) -> None:
    """Raise a ValueError for an argument without a key, or a group that is not set to a name."""
    for override in OverridesParser.create().parse_overrides([*overrides]):
        if not override.key_or_group:
            raise ValueError(f"an argument must be KEY=VALUE, got {override.input_line!r}")
        choices = reference().groups.get(override.key_or_group)
        if choices is not None and not override.is_sweep_override():
            value = override.value()
            if not (isinstance(value, str | dict) or override.is_delete()):
                raise ValueError(_wrong_choice(override.key_or_group, value, choices))


def _explain(error: BaseException, recipe: Path | None) -> str:
    """Return one line with the key, what it must be and what it got, from Hydra's several lines.

    `recipe` is the file whose lines the error may be about.
    """
    words = str(error)
    while not isinstance(error, SPECIFIC) and (below := error.__cause__ or error.__context__):
        error = below
    full_key = str(getattr(error, "full_key", None) or "")
    is_in_file = recipe is not None and words.startswith("In '")
    place = place_of(recipe, full_key) if is_in_file and recipe is not None else ""
    match error:
        case yaml.YAMLError():
            return syntax_error(error, "the recipe")
        case OverrideParseException():
            return (
                "an argument must be KEY=VALUE, where text with special characters is quoted twice "
                f"""("data.system='a, b'"), got {error.override!r}"""
            )
        case MissingConfigException(missing_cfg_file=str(name)):
            group, _, choice = name.rpartition("/")
            if choices := reference().groups.get(group):
                return place_with(recipe, choice) + _wrong_choice(group, choice, choices)
            return f"{place_with(recipe, name)}defaults must name files, got {name!r}"
        case ConfigKeyError() | ConfigAttributeError():
            written = re.match(r"Could not override '([^']+)'", words)
            key = written[1] if written and written[1].startswith(full_key) else full_key
            return place + _unknown_key(key, error.object_type_str or "")
        case ValidationError() if full_key:
            return place + _wrong_type(full_key, error)
        case MissingMandatoryValue() if full_key:
            return f"{full_key} must be given, got ???"
    missing = re.match(r"Could not override '(\w+)'\. No match in the defaults list", words)
    if missing and missing[1] in reference().groups:
        return f"{recipe}: {WITHOUT_CONFIG}"
    if merge := re.search(r"is not a subclass of (\w+)\. value: (.*)", words):
        key = reference().section_keys.get(merge[1], merge[1])
        return f"{place_of(recipe, key) if recipe else ''}{key} must be a section, got {merge[2]}"
    known = reference().keys.get(full_key)
    if known is not None and "Cannot merge DictConfig with ListConfig" in str(error):
        return f"{place}{full_key} must be {WANTED[known.type]}, got a section"
    if ambiguous := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", words):
        key, value = ambiguous.groups()
        return f"{key} must be one value, a list as [{value}], or come with --multirun, got {value}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    technical = ("full_key", "object_type", "reference_type", "See https", "Config search path")
    said = " ".join(line for line in lines if not line.startswith(technical))
    return said + (f" (key {full_key})" if full_key and full_key not in said else "")


def _wrong_choice(group: str, choice: object, choices: Iterable[str]) -> str:
    if reason := reference().reason_without(str(choice)):
        return f"{group} must be one of {', '.join(choices)}, got {choice!r}: {reason}"
    return wrong_choice(group, choice, choices)


def _unknown_key(key: str, section: str) -> str:
    """Return one line about a key that `section`, the name of a dataclass, does not have."""
    known = reference().keys.get(key)
    if known is not None and known.is_everywhere:
        return WITHOUT_CONFIG
    if known is not None:
        group = key.partition(".")[0]
        choices = reference().groups[group].items()
        chosen = [choice for choice, each in choices if each.section.__name__ == section]
        wanted = "|".join(known.choices)
        return f"{key} must come with {group}={wanted}, got it with {group}={'|'.join(chosen)}"
    must = f"{key} must be a known key, got an unknown one"
    if reason := reference().reason_without(key):
        return f"{must}: {reason}"
    if meant := reference().meant_by(key):
        return f"{must}{did_you_mean(meant)}"
    head = key.partition(".")[0]
    return f"{must}: `llamarl config{f' {head}' if head in reference().sections else ''}` lists all"


def _wrong_type(key: str, error: ValidationError) -> str:
    name = key.partition("[")[0]
    known = reference().keys.get(name)
    wanted = WANTED[known.type] if known is not None else "keys with their values"
    shown = re.match(r"Value '(.*)' (?:of type|is not)", error.msg or "", re.DOTALL)
    got = repr(error.value) if shown is None or shown[1] == error.value else shown[1]
    if error.value is None and known is not None and name == key:  # what null may be to say
        got += f" ({known.zero or f'the default is {known.default}'})"
    return f"{name} must be {wanted}, got {got}"
