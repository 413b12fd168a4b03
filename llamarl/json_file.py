"""JSON files that may be damaged or made by others: the only error is a ValueError of one line; and
texts that may hold half a character."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SURROGATE = "\\ud"  # begins the escape of half a character


def whole_letters(text: str) -> str:
    """The text with U+FFFD in place of each half of a character, which no encoding can hold; two
    halves that belong together are that character."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def parse(text: str | bytes) -> Any:
    """The value in `text`; ValueError says what is wrong, and at which column."""
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text)
        if "\\u" in text and SURROGATE in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError as error:
        half = f"{error.object[error.start]!r}"
        raise ValueError(f"{half}, half of a character, as text") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#04x} at column {error.start + 1}"
        raise ValueError(f"{place}, which is not UTF-8") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"a mistake at {line}column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("lists or objects nested too deep") from None
    except ValueError:  # Python reads no whole number of more than 4300 digits
        raise ValueError("a number of too many digits") from None


def read_bytes(path: Path) -> bytes:
    """The content of a regular file (reading a pipe would block); ValueError says what is wrong."""
    if not path.is_file():
        raise ValueError("no file" if not path.exists() else "something that is no file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"a file that cannot be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; ValueError if it holds anything else."""
    try:
        value = parse(read_bytes(path))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got a damaged file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def write_object(path: Path, value: Mapping[str, object]) -> None:
    """Replace `path` in one move. ValueError for a number that is not finite."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(unfinished, path)
