"""What a config's source says of its fields: the text under each, limits, a section's summary.

Owns: reading those. Does not own: the fields (`config/`) or how they are shown
(`config_reference.py`). Invariant: a text is the one under the field, of this class or of one that
it inherits from.
"""

import ast
import inspect
from functools import cache
from itertools import pairwise
from pathlib import Path

from llamarl.config.check import limits_of


def meaning_of(section: type, name: str) -> str:
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


def limit_words(section: type, name: str) -> str:
    """The limits of a number, as ` from 0 to 1`; nothing for any other field."""
    limits = limits_of(section, name)
    if "most" not in limits:
        return ""
    words = "from" if "least" in limits else "above"
    lowest = limits.get("least", limits.get("above"))
    return f" {words} {lowest:.16g} to {limits['most']:.16g}"


def summary_of(section: type) -> str:
    """What a section is for, as one line."""
    return " ".join((section.__doc__ or "").split())
