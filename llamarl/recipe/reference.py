"""The reference of the config: every key with its type, default, limits and meaning."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
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

from llamarl.core import config
from llamarl.core.fields import did_you_mean, limits_of
from llamarl.recipe.names_elsewhere import ELSEWHERE, FOREIGN_SECTIONS, NOT_HERE


@cache
def _meanings(section: type) -> dict[str, str]:
    """Return the text under each field of the class and of those that it inherits from, as one
    line."""
    inherited = [_meanings(each) for each in section.__bases__ if each is not object]
    texts = {name: text for each in reversed(inherited) for name, text in each.items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for item, after in pairwise(tree.body):
        match item, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                texts[name] = " ".join(str(text).split())
    return texts


def summary_of(section: type) -> str:
    """Say what a section is for, in one line."""
    return " ".join((section.__doc__ or "").split())


TYPES = {Any: "str|list[str]", int: "int", float: "float", bool: "bool", str: "str"}
TYPES[type(None)] = "null"
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
ABSENT = {name for names in NOT_HERE.values() for name in names.split()}
ZERO = re.compile(r"(?:; |\. )(0(?::| [a-z])[^.;]*)")
WIDTH = 100
INDENT = "    "


@dataclasses.dataclass(frozen=True)
class Choice:
    """A choice is a value of a group: it selects a dataclass, and sets fields of it."""

    section: type
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a recipe: `choices` of its group have it, with `defaults` that may differ."""

    name: str
    type: str
    limits: str
    meaning: str
    defaults: Mapping[str, str]
    choices: tuple[str, ...]
    is_everywhere: bool

    @property
    def default(self) -> str:
        """Return the default of the first choice that has it."""
        return next(iter(self.defaults.values()))

    @property
    def zero(self) -> str:
        """Say what 0 does, as the meaning has it, such as "0: no limit"; "" if it does nothing of
        its own."""
        found = ZERO.search(self.meaning) if self.type in ("int", "float") else None
        return found[1] if found is not None else ""

    def line(self) -> str:
        """Return key, type, default and first sentence, each in its column."""
        sentence = self.meaning.partition(". ")[0].rstrip(".:") + "."
        return f"{self.name:<36}{self.type:<12}{self.default:<14} {sentence}"

    def text(self) -> str:
        """Return its whole description, as an indented paragraph under its name."""
        others: dict[str, list[str]] = {}
        for choice, value in self.defaults.items():
            if value != self.default:
                others.setdefault(value, []).append(choice)
        facts = f"{self.type}{self.limits}, default {self.default}"
        if differing := [f"{', '.join(names)}: {value}" for value, names in others.items()]:
            facts += f" ({'; '.join(differing)})"
        if not self.is_everywhere:
            facts += f"; only with {self.name.partition('.')[0]}={'|'.join(self.choices)}"
        paragraphs = [facts, self.meaning]
        if self.name in ELSEWHERE:
            paragraphs.append("elsewhere: " + ", ".join(ELSEWHERE[self.name].split()))
        return "\n".join([self.name, *(_indented(each) for each in paragraphs)])


class KeyReference:
    """The reference of all sections, groups and keys of a recipe. The file `root` selects a choice
    of each group; `groups` holds the choices."""

    def __init__(self, root: Path, groups: Mapping[str, Mapping[str, Choice]]) -> None:
        self._hints: dict[str, Any] = typing.get_type_hints(config.Config)
        self._composed = yaml.safe_load(root.read_text())
        entries = (entry for entry in self._composed["defaults"] if isinstance(entry, dict))
        selected = {name: choice for entry in entries for name, choice in entry.items()}
        self.groups = {
            name: {selected[name]: choices[selected[name]], **choices}  # the default first
            for name, choices in groups.items()
        }
        self.sections: dict[str, dict[str, Choice]] = {
            name: self.groups.get(name, {"": Choice(kind)})
            for name, kind in self._hints.items()
            if hasattr(kind, "__dataclass_fields__")
        }
        self._scalars = [name for name in self._hints if name not in self.sections]

    @cached_property
    def keys(self) -> dict[str, Key]:
        """Return every key by its name, in the order of the dataclasses."""
        root = {"": Choice(config.Config)}
        found = {name: self._key("", name, root) for name in self._scalars}
        for section, choices in self.sections.items():
            for name in (name for each in choices.values() for name in _leaves(each.section)):
                full = f"{section}.{name}"
                found[full] = found.get(full) or self._key(section, name, choices)
        return found

    def _key(self, section: str, name: str, choices: Mapping[str, Choice]) -> Key:
        having = {c: each for c, each in choices.items() if name in _leaves(each.section)}
        kind, first = _leaves(next(iter(having.values())).section)[name]
        fields = {choice: _leaves(each.section)[name][1] for choice, each in having.items()}
        defaults = {choice: _as_yaml(default_of(field)) for choice, field in fields.items()}
        if not section:
            defaults = {"": self._composed.get(name, defaults[""])}
        limits, limit_words = limits_of(kind, first.name), ""  # of a number
        if "most" in limits:
            words, lowest = ("from", "least") if "least" in limits else ("above", "above")
            limit_words = f" {words} {limits[lowest]:.16g} to {limits['most']:.16g}"
        return Key(
            name=f"{section}.{name}".lstrip("."),
            type=_type_words(typing.get_type_hints(kind)[first.name]),
            limits=limit_words,
            meaning=_meanings(kind).get(first.name, ""),
            defaults=defaults,
            choices=tuple(having),
            is_everywhere=len(having) == len(choices),
        )

    @cached_property
    def section_keys(self) -> dict[str, str]:
        """Return the key of each section, by the name of its class."""
        kinds = {
            each.section: name for name, all_ in self.sections.items() for each in all_.values()
        }
        inner: dict[Any, str] = {
            kind: vars(kind).get("key", "")
            for section in kinds
            for kind, _ in _leaves(section).values()
        }
        return {kind.__name__: key for kind, key in (inner | kinds).items()}

    def overview(self, width: int | None = None) -> str:
        """Return a line per key, then names in other projects; each has at most `width`
        characters."""
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
        """Return the whole text of all groups, sections and keys."""
        groups = [f"  {name:<12}{' | '.join(choices)}" for name, choices in self.groups.items()]
        texts = [
            "\n".join(["groups, chosen by GROUP=CHOICE (the first is the default):", *groups]),
            "keys, set by KEY=VALUE:",
            *(self.keys[name].text() for name in self._scalars),
            *map(self._section_text, self.sections),
        ]
        return "\n\n".join(texts) + "\n"

    def about(self, name: str) -> str:
        """Return the text of a key, a section, a choice of a group, a last part of keys, or a name
        from elsewhere, for which it may be the reason that no key does it; ValueError for any
        other."""
        if name in self.keys:
            return self.keys[name].text()
        if name in self.sections:
            return self._section_text(name)
        if groups := [group for group, choices in self.groups.items() if name in choices]:
            return "\n".join(self._choice_words(group, name) for group in groups)
        meant = _elsewhere_in_full(name)
        if not meant and (reason := self.reason_without(name)):
            return f"{name}\n{_indented(f'No key here: {reason}.')}"
        section, _, leaf = name.rpartition(".")
        here = section.partition(".")[0] in self.sections  # then a wrong key of that section
        meant = meant or _elsewhere(name) or ([] if here else self._with_leaf(leaf))
        if meant:
            return "\n\n".join(map(self.about, meant))
        must = "KEY must be one that `llamarl config` lists"
        raise ValueError(f"{must}, got {name!r}{did_you_mean(self.meant_by(name))}")

    def reason_without(self, name: str) -> str | None:
        """Say why nothing here does what `name` does elsewhere; None where that is not known."""
        if _elsewhere_in_full(name):
            return None
        words = {*name.split(".")}
        found = (why for why, names in NOT_HERE.items() if words & {*names.split()})
        sections = (why for why, names in FOREIGN_SECTIONS.items() if name in names.split())
        return next(found, None) or next(sections, None)

    def _with_leaf(self, leaf: str) -> list[str]:
        """Return the keys whose last part this is."""
        return [key for key in self.keys if key.rpartition(".")[2] == leaf]

    def _section_text(self, name: str) -> str:
        choices = self.sections[name]
        lines = [f"== {name}: {summary_of(self._hints[name])}"]
        for choice in choices if name in self.groups else ():
            lines.append(_indented(self._choice_words(name, choice)))
        head = "\n".join(lines)
        keys = [key.text() for key in self.keys.values() if key.name.startswith(f"{name}.")]
        return "\n\n".join([head, *keys])

    def _choice_words(self, group: str, choice: str) -> str:
        """Return `GROUP=CHOICE`, what it is for and the fields that it sets."""
        each = self.groups[group][choice]
        sets = ", ".join(f"{key}: {_as_yaml(value)}" for key, value in each.values.items())
        said = [summary_of(each.section)] if each.section is not self._hints[group] else []
        words = " ".join([*said, *([f"Sets {sets}."] if sets else [])])
        return f"{group}={choice}  {words}".strip()

    def meant_by(self, name: str) -> list[str]:
        """Return the keys or groups that the unknown `name` may stand for, likeliest first."""
        section, _, leaf = name.rpartition(".")
        if known := _elsewhere(name):
            same_section = [f"{section}.{key.rpartition('.')[2]}" for key in known]
            return [key for key in same_section if key in self.keys] or known
        if same := [key for key in self._with_leaf(leaf) if key != name]:
            return same[:3]
        close = difflib.get_close_matches(name, [*self.keys, *self.sections], n=1, cutoff=0.8)
        leaves = {key.rpartition(".")[2]: key for key in reversed(self.keys)}
        near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        around = _first_elsewhere(name.split(".")[-2::-1])
        return close or around or [leaves[each] for each in near]


def _elsewhere(name: str) -> list[str]:
    """Return the key that a name from elsewhere stands for, in full or by its last part, if any."""
    return _elsewhere_in_full(name) or _first_elsewhere([name.rpartition(".")[2]])


def _elsewhere_in_full(name: str) -> list[str]:
    """Return the key that a name from elsewhere stands for, by the whole name or by an end of it
    that has several parts, the longest first: `model.path` also as `model_path`. Keys in a section
    of something that is not here, such as `critic.model.path`, stand for none."""
    parts = name.split(".")
    absent = next((at for at, part in enumerate(parts) if part in ABSENT), len(parts))
    ends = [parts[at:] for at in range(max(1, len(parts) - 1)) if at <= absent]
    return _first_elsewhere([joint.join(end) for end in ends for joint in (".", "_")])


def _first_elsewhere(names: list[str]) -> list[str]:
    """Return the key that the first of these stands for which stands for any."""
    each = ([key for key, words in ELSEWHERE.items() if name in words.split()] for name in names)
    return next((found for found in each if found), [])


@cache
def _leaves(section: type) -> dict[str, tuple[type, dataclasses.Field[Any]]]:
    """Return the class and field of each key of a section, by its name there; "lora.rank" is in a
    section of its own."""
    found: dict[str, tuple[type, dataclasses.Field[Any]]] = {}
    for field in dataclasses.fields(section):
        inner: Any = field.default_factory
        if dataclasses.is_dataclass(inner) and section is not config.Config:
            assert isinstance(inner, type)
            found |= {f"{field.name}.{name}": each for name, each in _leaves(inner).items()}
        else:
            found[field.name] = section, field
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field of the config's dataclasses."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _type_words(hint: Any) -> str:
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is UnionType:
        return "|".join(map(_type_words, parts))
    if kind is dict:
        return "section"
    return f"list[{_type_words(parts[0])}]" if kind is list else TYPES[hint]


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
