"""A chat template of the recipe's own, and the day that a template says."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from llamarl.core.config import Config
from llamarl.model.tokenizer import load_tokenizer
from llamarl.recipe.local_inputs import with_local_files
from llamarl.recipe.prompt_inputs import resolve
from tests.model.tokenizer_files import write_tokenizer
from tests.places import RECIPE
from tests.recipe.composing import compose_recipe

DATED = "{{ strftime_now('%d %b %Y') }}|{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets"


def recipe(tmp_path: Path, *values: str) -> Config:
    """The quickstart with chat, and this template."""
    (tmp_path / "own.jinja").write_text(DATED)
    own = ["data.chat=true", f"data.chat_template={tmp_path / 'own.jinja'}"]
    return compose_recipe(RECIPE, [f"recipe_dir='{RECIPE}'", *own, *values])


def save(config: Config, folder: Path) -> None:
    data = {"date": config.data.date, "prompts": "x"}
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": data}))


def test_a_run_that_goes_on_elsewhere_keeps_its_day(assets: Path, tmp_path: Path) -> None:
    step = tmp_path / "first" / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    save(recipe(tmp_path, "data.date=2024-07-26"), tmp_path / "first")
    config, _ = with_local_files(recipe(tmp_path, f"checkpoint.resume={step}"), "train")
    assert config.data.date == "2024-07-26"
    own = recipe(tmp_path, f"checkpoint.resume={step}", "data.date=2025-01-01")
    assert with_local_files(own, "train")[0].data.date == "2025-01-01"


def test_a_template_without_a_day_leaves_it_open(tmp_path: Path) -> None:
    config, pinned = with_local_files(compose_recipe(RECIPE, [f"recipe_dir='{RECIPE}'"]), "train")
    assert config.data.date is None
    assert "data.date" not in pinned


@pytest.mark.parametrize("text", ["26 Jul 2024", "2024-7-26", "20240726", "2024-13-01"])
def test_another_form_of_a_day_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^data\.date must be such as 2026-05-01, got"):
        compose_recipe(RECIPE, [f"data.date='{text}'"])


def test_the_own_template_replaces_the_tokenizers(assets: Path, tmp_path: Path) -> None:
    """Whatever files the tokenizer's own ones are in."""
    source = write_tokenizer(tmp_path / "tokenizer", chat=True)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    config = recipe(tmp_path, f"model.tokenizer={source}", "data.date=2024-07-26")
    config, _ = with_local_files(config, "plan")
    folder = resolve(config, config.model.tokenizer or "")
    messages = [{"role": "user", "content": "hello"}]
    own = load_tokenizer(folder, day=config.data.date)
    assert own.render_chat(messages) == "26 Jul 2024|hello"
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == DATED
    assert load_tokenizer(source).render_chat(messages).startswith("<bos><user>hello")


def test_a_template_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    (tmp_path / "own.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"^data\.chat_template must name a file of UTF-8 text"):
        with_local_files(config, "train")
    (tmp_path / "own.jinja").unlink()
    with pytest.raises(ValueError, match=r"^data\.chat_template must name a file of UTF-8 text"):
        with_local_files(config, "train")


FORMATS = ["%d %b %Y", "%-d %B %y", "%Y-%m-%d %H:%M", "%A, the %j. day, 100%% sure", "%x %X %p"]
FORMATS += ["%F, week %V", "%e %h, %D %T", "%%d is %d"]


@pytest.mark.parametrize("head", ["", "\n", " "])
def test_a_fixed_day_is_written_as_strftime_does(head: str, tmp_path: Path) -> None:
    """And nothing else of the template changes."""
    folder = write_tokenizer(tmp_path, chat=True)
    says = [f"{{% set day = strftime_now('{form}') %}}[{{{{ day }}}}]" for form in FORMATS]
    text = head + "".join(says) + "{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(text)
    messages = [{"role": "user", "content": "hello"}]
    fixed = load_tokenizer(folder, day="2024-07-06").render_chat(messages)
    plain = AutoTokenizer.from_pretrained(folder)
    for form in FORMATS:
        text = text.replace(f"strftime_now('{form}')", "'x'")
    plain.chat_template = text
    expected = plain.apply_chat_template(messages, tokenize=False)
    for form in FORMATS:
        expected = expected.replace("[x]", f"[{datetime(2024, 7, 6).strftime(form)}]", 1)
    assert fixed == expected
