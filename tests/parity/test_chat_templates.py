"""The chat templates of model families as they are published, which TRL ships: which of them hold
tools' results and observations, and why others are refused."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.config import EnvironmentConfig
from llamarl.model.tokenizer import Tokenizer
from llamarl.scoring.definition import Kind
from llamarl.scoring.turn_format import TurnFormat
from tests.model import chat_templates as writing
from tests.scoring.test_turn_format import ADD, STEPS, TOOLS

pytestmark = pytest.mark.parity

AUTO = EnvironmentConfig()
TRL = importlib.util.find_spec("trl")
FOLDER = Path(next(iter(TRL.submodule_search_locations or [""])) if TRL else "") / "chat_templates"
TEMPLATES = sorted(path for path in FOLDER.glob("*.jinja") if "training" not in path.stem)
SPECIAL = re.compile(
    r"<\|[^|>]+\|?>|<[^<|>]+\|>|<\uff5c[^>]+\uff5c>|</?s>|<(?:start|end)_of_[a-z]+>"
)
TURN_ENDS = {  # by the beginning of the name: what ends a completion there
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<\uff5cend▁of▁sentence\uff5c>"],
    "diffusion_gemma": ["<turn|>"],
    "gemma": ["<end_of_turn>"],
    "gemma4": ["<turn|>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|endoftext|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "lfm2": ["<|im_end|>"],
    "llama3": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "llava": ["<|im_end|>"],
    "muse": ["<|eot|>", "<|eom|>"],
    "nemotron": ["<|im_end|>"],
    "phi": ["<|endoftext|>", "<|end|>"],
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "smolvlm": ["<end_of_utterance>"],
}
FORMS = {  # of calls, by the beginning of the name; the others have forms that are not read
    "llama3_1": "llama",
    "llama3_2": "llama",
    "nemotron": "xml",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "xml",
    "qwen3_6": "xml",
    "qwen3_8": "xml",
}
NO_FORM = "for a chat template that shows none"
WITHOUT_TOOLS = {"qwen2_5_vl": NO_FORM}
IMAGES = {  # whose messages must be lists of parts, for there are images among them
    "idefics3": "must keep earlier turns",
    "llava_next": "must suit the chat template",
    "smolvlm": "must keep earlier turns",
}


def by_name(table: dict[str, Any], name: str) -> Any:
    """The entry of the longest key that the name begins with."""
    return table.get(max((key for key in table if name.startswith(key)), key=len, default=""))


def make(folder: Path, path: Path) -> Tokenizer:
    text, ends = path.read_text(), by_name(TURN_ENDS, path.stem)
    special = sorted({*SPECIAL.findall(text), *ends})
    return writing.write_tokenizer(folder, text, ["<pad>", *special], ends)


def observed(tokenizer: Tokenizer, kind: Kind, messages: list[dict[str, Any]]) -> str:
    """An observation after a turn that stopped without its end."""
    turns = TurnFormat(tokenizer, kind, AUTO)
    return tokenizer.decode_raw(turns.observation(messages, tokenizer.vocabulary["x"]))


def ids(path: Path) -> str:
    return path.stem


def test_there_are_thirty_families() -> None:
    assert len(TEMPLATES) >= 30


@pytest.mark.parametrize("path", TEMPLATES, ids=ids)
def test_an_observation_is_what_the_template_puts_after_an_answer(
    path: Path, tmp_path: Path
) -> None:
    tokenizer = make(tmp_path, path)
    said = [{"role": "user", "content": "and more"}]
    if why := IMAGES.get(path.stem):
        with pytest.raises(ValueError, match=why):
            TurnFormat(tokenizer, STEPS, AUTO)
        return
    found = observed(tokenizer, STEPS, said)
    turn = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nsome words"}
    whole = tokenizer.render_chat([{"role": "user", "content": "q"}, turn, *said])
    assert whole.endswith(found)
    rest = whole.removesuffix(found).rpartition("some words")[2]
    assert rest == ("<|END_RESPONSE|>" if path.stem == "cohere2" else ""), "the model writes it"
    assert "and more" in found


@pytest.mark.parametrize("path", TEMPLATES, ids=ids)
def test_a_result_is_what_the_template_puts_after_a_call(path: Path, tmp_path: Path) -> None:
    tokenizer = make(tmp_path, path)
    if by_name(FORMS, path.stem) is None or path.stem in WITHOUT_TOOLS:
        with pytest.raises(ValueError, match=NO_FORM):
            TurnFormat(tokenizer, TOOLS, AUTO)
        return
    assert TurnFormat(tokenizer, TOOLS, AUTO).family == by_name(FORMS, path.stem)
    results = [{"role": "tool", "name": "add", "content": "and more"}]
    found = observed(tokenizer, TOOLS, results)
    call = {"name": "add", "arguments": {"a": "some words"}}
    functions = [{"type": "function", "id": "call00001", "function": call}]
    turn = {"role": "assistant", "content": "", "tool_calls": functions}
    whole = tokenizer.render_chat([{"role": "user", "content": "q"}, turn, *results], [ADD])
    assert whole.endswith(found)
    rest = whole.removesuffix(found).rpartition("some words")[2]
    assert not SPECIAL.search(rest), "only the rest of the call stands before its end"
    assert "and more" in found
