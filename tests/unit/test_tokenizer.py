import json
import re
import resource
import subprocess
import sys

import pytest

from llamarl.config import DataConfig
from llamarl.data import bounds
from llamarl.data.tokenizer import check_tokenizer, load_tokenizer, split_stops
from llamarl.environments.prompts import read_prompts
from tests.unit.tokenizer_files import write_tokenizer

TEXT = "What is 12 + 3 ? It's  n't , caf\u00e9 \U0001f600 ."


def test_text_survives_encoding_and_decoding_without_special_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 0
    assert tokenizer.decode([*ids, 1, 2, 2]) == TEXT
    assert tokenizer.encode(TEXT, special=False) == ids[1:]


def test_the_tokenizer_gives_the_ids_that_auto_tokenizer_gives(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(write_tokenizer(tmp_path, chat=True))
    auto = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tokenizer.encode(TEXT) == auto.encode(TEXT)
    messages = [{"role": "user", "content": TEXT}]
    chat_ids = tokenizer.encode(tokenizer.render_chat(messages), special=False)
    expected = auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat_ids == expected
    assert tokenizer.decode(chat_ids) == auto.decode(chat_ids, skip_special_tokens=True)


def test_end_of_sequence_ids_join_those_of_the_generation_config(tmp_path):
    own = load_tokenizer(write_tokenizer(tmp_path / "a")).eos_token_ids
    both = load_tokenizer(write_tokenizer(tmp_path / "b", generation_eos=[5, 1])).eos_token_ids
    one = load_tokenizer(write_tokenizer(tmp_path / "c", generation_eos=7)).eos_token_ids
    assert (own, both, one) == ((1,), (1, 5), (1, 7))


def test_loading_a_tokenizer_loads_no_torch_and_importing_data_no_transformers(tmp_path):
    write_tokenizer(tmp_path)
    code = (
        "import sys; import llamarl.environments.prompts, llamarl.executors.stage as s\n"
        "assert 'transformers' not in sys.modules\n"
        f"t = s.load_tokenizer({str(tmp_path)!r}); t.decode(t.encode('a'))\n"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "a"))
    assert tokenizer.num_ids == 259
    check_tokenizer(tokenizer, 259)
    with pytest.raises(ValueError, match=r"vocabulary of 258 tokens, got token id 258"):
        check_tokenizer(tokenizer, 258)
    with_far_eos = load_tokenizer(write_tokenizer(tmp_path / "b", generation_eos=300))
    with pytest.raises(ValueError, match="got token id 300"):
        check_tokenizer(with_far_eos, 259)


def test_a_chat_template_that_refuses_messages_is_named(tmp_path):
    with_template = load_tokenizer(write_tokenizer(tmp_path, chat=True))
    with pytest.raises(ValueError, match=r"must suit the chat template .* no tools here"):
        with_template.render_chat([{"role": "tool", "content": "x"}])


def test_missing_and_damaged_tokenizer_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="folder must exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"must hold tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="end-of-sequence token"):
        load_tokenizer(write_tokenizer(tmp_path / "a", eos=False))
    write_tokenizer(tmp_path, generation_eos=["two"])
    with pytest.raises(ValueError, match=r"generation_config\.json must be a token id"):
        load_tokenizer(tmp_path)
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        good = (tmp_path / name).read_text()
        (tmp_path / name).write_text(good[: len(good) // 2])
        with pytest.raises(ValueError, match=rf"{name} must be JSON"):
            load_tokenizer(tmp_path)
        (tmp_path / name).write_text("[]")
        with pytest.raises(ValueError, match=rf"{name} must hold a JSON object, got list"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ValueError, match="must hold a model with a 'vocab'"):
        load_tokenizer(tmp_path)


def test_a_setting_of_a_wrong_type_is_refused_when_the_tokenizer_is_loaded(tmp_path):
    path = write_tokenizer(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": []}))
    with pytest.raises(ValueError, match="must be a tokenizer that transformers loads"):
        load_tokenizer(tmp_path)


def test_a_stop_string_that_is_a_special_token_is_an_id_and_one_with_more_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    token, token_id = next(iter(tokenizer.special_ids.items()))
    assert split_stops(tokenizer, ["a", token, "b"]) == ((token_id,), ("a", "b"))
    must = f"sampling.stop_strings must hold a special token, such as '{token}', by itself"
    with pytest.raises(ValueError, match=must):
        split_stops(tokenizer, [f"{token}."])


def test_threads_may_load_the_first_tokenizer_of_a_process_at_once(tmp_path):
    write_tokenizer(tmp_path)
    code = (
        "import threading, time; from llamarl.data.tokenizer import load_tokenizer\n"
        "failed = []; threading.excepthook = lambda args: failed.append(args.exc_value)\n"
        f"load = lambda: load_tokenizer({str(tmp_path)!r})\n"
        "threads = [threading.Thread(target=load) for _ in range(6)]\n"
        "[(each.start(), time.sleep(0.03)) for each in threads]\n"
        "[each.join() for each in threads]\n"
        "assert not failed, failed\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("template", "content", "reason"),
    [
        ("{{ 'a' + messages[0]['content'] }}", [{"type": "text"}], "TypeError: can only concat"),
        ("{{ 'a' + messages[0]['content'] }}", 7, "TypeError: can only concat"),
        ("{{ 1 / 0 }}", "a", "ZeroDivisionError: division by zero"),
        ("{% for i in range(10**9) %}a{% endfor %}", "a", "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "a", "RecursionError"),
        (
            "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}",
            "a",
            "TimeoutError: it took over 0.3 s",
        ),
        ("{{ 'a' * 10**11 }}", "a", "MemoryError"),
    ],
)
def test_a_template_that_fails_or_takes_too_much_is_one_line_with_its_place(
    tmp_path, template, content, reason, monkeypatch
):
    monkeypatch.setattr(bounds, "TIME_S", 0.3)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, chat=True))
    tokenizer._backend.chat_template = template
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"question": [{"role": "user", "content": content}]}))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        read_prompts(path, DataConfig(prompts="p", chat=True), tokenizer)
    said = str(raised.value)
    assert said.startswith(f"{path}:1: the messages must suit the chat template of")
    assert "\n" not in said
    assert len(said) < 1000
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_prompt_of_millions_of_characters_is_refused_before_it_becomes_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"question": "ab " * 20_000_000}))
    must = r"p\.jsonl:1: the prompt must have at most 1024 tokens .* got 60,000,000 characters"
    with pytest.raises(ValueError, match=must):
        read_prompts(path, DataConfig(prompts="p"), tokenizer)


def replacing(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("rules", "times"),
    [
        ([replacing({"String": "a"}, "a" * 10)] * 9, "1e+09"),
        ([{"type": "Sequence", "normalizers": [replacing({"String": "ab"}, "ab" * 200)] * 2}], 4e4),
        ([replacing({"Regex": "(?=a)"}, "a")] * 30, "1.07e+09"),
        ([replacing({"String": ""}, "a" * 20_000)], 2e4),
        ([replacing({"String": " "}, "\u2581"), replacing({"Regex": " {2,}"}, " ")], None),
        ([replacing({"String": "``"}, '"'), {"type": "NFKC"}, {"type": "Lowercase"}], None),
    ],
)
def test_a_tokenizer_whose_rules_make_a_text_many_times_as_long_is_refused(tmp_path, rules, times):
    """It would end the process with a hundred lines when memory runs out."""
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    values = json.loads(path.read_text()) | {
        "normalizer": {"type": "Sequence", "normalizers": rules}
    }
    path.write_text(json.dumps(values))
    if times is None:
        assert load_tokenizer(tmp_path).encode("7", special=False)
        return
    must = "have a normalizer that makes a text at most 10000 times as long, got"
    with pytest.raises(ValueError, match=re.escape(f"{path} must {must} {float(times):.3g} times")):
        load_tokenizer(tmp_path)


def test_the_rules_for_decoding_count_too(tmp_path):
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    values = json.loads(path.read_text())
    decoders = [replacing({"String": "a"}, "a" * 100)] * 3 + [values["decoder"]]
    path.write_text(json.dumps(values | {"decoder": {"type": "Sequence", "decoders": decoders}}))
    with pytest.raises(ValueError, match=r"have a decoder .*, got 1e\+06 times"):
        load_tokenizer(tmp_path)
