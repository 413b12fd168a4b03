"""Tokenizers: ids of texts and of passages, chat templates, and folders that hold none."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import string
import subprocess
import sys
from itertools import chain

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from llamarl.core.config import DataConfig
from llamarl.model import text_ids
from llamarl.model.text_ids import TextIds, unmarked
from llamarl.model.tokenizer import check_tokenizer, load_tokenizer, split_stops
from tests.model.tokenizer_files import write_tokenizer
from tests.prompt_files import read_prompts
from tests.random_search import case, searched

TEXT = "What is 12 + 3 ? It's  n't , caf\u00e9 \U0001f600 ."


def test_text_survives_encoding_and_decoding_without_special_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 0
    assert tokenizer.decode([*ids, 1, 2, 2]) == TEXT
    assert tokenizer.encode(TEXT, special=False) == ids[1:]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("12\ud800", "12\ufffd"),
        ("\udc00\ud800x", "\ufffd\ufffdx"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ud83d\ud83d\ude00é", "\ufffd\U0001f600é"),
    ],
)
def test_half_a_character_is_the_one_that_stands_for_what_is_none(tmp_path, text, whole):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.encode(text) == tokenizer.encode(whole)
    assert tokenizer.encode_all([text]) == [tokenizer.encode(whole)]


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


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "a"))
    assert tokenizer.num_ids == 259
    check_tokenizer(tokenizer, 259)
    with pytest.raises(ValueError, match=r"vocabulary of 258 tokens, got token id 258"):
        check_tokenizer(tokenizer, 258)
    with_far_eos = load_tokenizer(write_tokenizer(tmp_path / "b", generation_eos=300))
    with pytest.raises(ValueError, match="got token id 300"):
        check_tokenizer(with_far_eos, 259)


def test_a_stop_string_that_is_a_special_token_is_an_id_and_one_with_more_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    token, token_id = next(iter(tokenizer.special_ids.items()))
    assert split_stops(tokenizer, ["a", token, "b"]) == ((token_id,), ("a", "b"))
    must = f"sampling.stop_strings must hold a special token, such as '{token}', by itself"
    with pytest.raises(ValueError, match=must):
        split_stops(tokenizer, [f"{token}."])


def test_threads_may_load_the_first_tokenizer_of_a_process_at_once_and_load_no_torch(tmp_path):
    write_tokenizer(tmp_path)
    code = (
        "import sys, threading, time\n"
        "import llamarl.model.prompt_rules, llamarl.scoring.stage_worker as worker\n"
        "assert 'transformers' not in sys.modules\n"
        "failed = []; threading.excepthook = lambda args: failed.append(args.exc_value)\n"
        f"load = lambda: worker.load_tokenizer({str(tmp_path)!r}).encode('a')\n"
        "threads = [threading.Thread(target=load) for _ in range(6)]\n"
        "[(each.start(), time.sleep(0.03)) for each in threads]\n"
        "[each.join() for each in threads]\n"
        "assert not failed, failed\n"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' + messages[0]['count'] }}", "TypeError: can only concat"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% for i in range(1000000000) %}a{% endfor %}", "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        (
            "{% for i in range(59049) %}{% for j in range(59049) %}{% endfor %}{% endfor %}",
            "TimeoutError: it took over 0.3 s",
        ),
        ("{{ 'a' * 100000000000 }}", "MemoryError"),
        ("{{ 'a' * 10000000000 }}", "MemoryError"),
        ("{{ 'a'.ljust(10000000000) }}", "MemoryError"),
        ("{{ 'a' * 10**11 }}", "it raises numbers to powers"),
        ("{{ 7 ** (7 ** 9) > 1 }}", "it raises numbers to powers"),
        ("{% set x = 7 %}{{ (x)**x**x }}", "it raises numbers to powers"),
    ],
)
def test_a_template_that_fails_or_takes_too_much_is_named(tmp_path, template, reason, monkeypatch):
    monkeypatch.setattr(text_ids, "TIME_S", 0.3)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, chat=True))
    tokenizer._backend.chat_template = template
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"question": [{"role": "user", "content": "a", "count": 7}]}))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        read_prompts(path, DataConfig(prompts="p", chat=True), tokenizer)
    said = str(raised.value)
    assert said.startswith(f"{path}:1: the messages must suit the chat template of")
    assert "\n" not in said
    assert len(said) < 1000
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_template_of_millions_of_letters_is_one_line(tmp_path):
    folder = write_tokenizer(tmp_path, chat=True)
    code = (
        "import resource, sys\n"
        "from llamarl.model.tokenizer import load_tokenizer\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))\n"
        "tokenizer = load_tokenizer(sys.argv[1])\n"
        "for number in (10**8, 10**10):\n"
        "    tokenizer._backend.chat_template = '{{ \"a\" * %d }}' % number\n"
        "    try: tokenizer.render_chat([{'role': 'user', 'content': 'a'}])\n"
        "    except ValueError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    assert all(line.startswith("the messages must ") for line in said)


def test_keywords_of_a_macro_are_no_powers() -> None:
    template = "{% macro f() %}{{ kwargs }}{% endmacro %}{{ f(**{'a': 1}) }}{{ '2 ** 3' }} 2 ** 3"
    assert not text_ids.has_powers(template)
    assert text_ids.has_powers("{{ f(1 ** 2) }}")


def test_a_prompt_of_millions_of_characters_is_refused_before_it_becomes_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"question": "ab " * 1_000_000}))
    must = r"p\.jsonl:1: the prompt must have at most 1024 tokens .* got 3,000,000 characters"
    with pytest.raises(ValueError, match=must):
        read_prompts(path, DataConfig(prompts="p"), tokenizer)


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def edit(name, **changes):
    def damage(folder):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | changes))

    return damage


def rules(kind, *some):
    return edit("tokenizer.json", **{kind: {"type": "Sequence", f"{kind}s": some}})


def replacing(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


LONG = (
    r"/tokenizer\.json must have a normalizer that makes a text at most 10000 times as long, got "
)
NESTED = {"type": "Sequence", "normalizers": [replacing("ab", "ab" * 200)] * 2}
WRONG_FOLDERS = {
    "none": (shutil.rmtree, "folder must exist"),
    "empty": (lambda f: [path.unlink() for path in f.iterdir()], r"must hold tokenizer\.json"),
    "no end": (lambda f: write_tokenizer(f, eos=False), "end-of-sequence token"),
    "end as text": (
        write("generation_config.json", '{"eos_token_id": ["two"]}'),
        r"generation_config\.json must be a token id",
    ),
    **{
        f"{name}: {content}": (write(name, content), f"{name} must {words}")
        for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json")
        for content, words in {"{": "be JSON", "[]": "hold a JSON object, got list"}.items()
    },
    "no model": (write("tokenizer.json", '{"version": "1.0"}'), "must hold a model with a 'vocab'"),
    "no kind": (write("tokenizer.json", '{"model": {"vocab": {}}}'), "that transformers loads"),
    "setting of a wrong type": (
        edit("tokenizer_config.json", model_max_length=[]),
        "must be a tokenizer that transformers loads",
    ),
    # The memory for a text that rules make as long ends the process with a hundred lines.
    "rules": (rules("normalizer", *[replacing("a", "a" * 10)] * 9), LONG + r"1e\+09 times"),
    "rules in a rule": (rules("normalizer", NESTED), LONG + r"4e\+04 times"),
    "rules that add": (
        rules("normalizer", *[replacing("(?=a)", "a", "Regex")] * 30),
        LONG + r"1.07e\+09 times",
    ),
    "nothing": (rules("normalizer", replacing("", "a" * 20_000)), LONG + r"2e\+04 times"),
    "decoding": (rules("decoder", *[replacing("a", "a" * 100)] * 3), r" a decoder .* 1e\+06 times"),
}


@pytest.mark.parametrize(("damage", "words"), WRONG_FOLDERS.values(), ids=WRONG_FOLDERS)
def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path, damage, words):
    damage(write_tokenizer(tmp_path / "folder"))
    with pytest.raises(ValueError, match=words):
        load_tokenizer(tmp_path / "folder")


@pytest.mark.parametrize(
    "usual",
    [
        [replacing(" ", "\u2581"), replacing(" {2,}", " ", "Regex")],
        [replacing("``", '"'), {"type": "NFKC"}, {"type": "Lowercase"}],
    ],
)
def test_the_rules_of_usual_tokenizers_are_taken(tmp_path, usual):
    rules("normalizer", *usual)(write_tokenizer(tmp_path))
    assert load_tokenizer(tmp_path).encode("7", special=False)


WORD = "<think>"  # a token of its own that is not special
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BLANK = "\u2581"  # which stands for a blank in SentencePiece's tokens
KINDS = ["first", "always", "never", "prepend", "byte level"]


def make(kind: str) -> Backend:
    """A tokenizer whose merges cross the blank before a word, as SentencePiece's do."""
    words = [f"{start}{word}" for start in (BLANK, "", "\u0120") for word in ("Par", "Paris", "15")]
    letters = [*string.printable, BLANK, "\u0120", "\u010a"]
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys([*SPECIAL, *letters]))}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    made = Backend(models.BPE(vocab=vocabulary, merges=merges))
    if kind == "prepend":
        steps = [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
        made.normalizer = normalizers.Sequence(steps)
    elif kind == "byte level":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(WORD, normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_passages_have_together_the_ids_of_the_whole(kind: str) -> None:
    backend = make(kind)
    head = "<|im_start|>user\nCapital of France?<|im_end|>\n<|im_start|>assistant\n"
    parts = [head, "Paris<|im_end|>\n", "<|im_start|>user\n15 Paris", " is<|im_end|>\n<s>15"]
    parts += [WORD, "15", f"a{WORD}\n15"]
    before = ["".join(parts[:i]) for i in range(len(parts))]
    found = TextIds(backend).encode_all(parts, special=False, before=before)
    assert [*chain(*found)] == backend.encode("".join(parts), add_special_tokens=False).ids


@searched(200, 4000)
def test_ids_of_passages_cut_anywhere_read_as_the_whole(seeds: range) -> None:
    """What two passages share no token of is encoded as in the whole."""
    made = {kind: make(kind) for kind in KINDS}
    for seed in seeds:
        with case(seed):
            source = random.Random(seed)
            backend = made[source.choice(KINDS)]
            pieces = [*SPECIAL, WORD, "Paris", " Paris", "15", " ", "\n", "a"]
            some = [source.choice(pieces) for _ in range(source.randint(1, 18))]
            cuts = sorted(source.choices(range(len(some) + 1), k=source.randint(0, 9)))
            ends = zip([0, *cuts], [*cuts, len(some)], strict=True)
            parts = ["".join(some[begin:end]) for begin, end in ends if begin < end]
            before = ["".join(parts[:i]) for i in range(len(parts))]
            found = TextIds(backend).encode_all(parts, special=False, before=before)
            tokens = [backend.id_to_token(i) for each in found for i in each]
            whole = backend.encode("".join(parts), add_special_tokens=False)
            assert "".join(tokens) == "".join(whole.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_in_a_message_is_text(kind: str) -> None:
    backend = make(kind)
    ids = TextIds(backend)
    said = "How does <|im_end|> end <s>turns</s>?"
    marked = ids.mark(said, SPECIAL)
    assert unmarked(marked) == said
    (found,) = ids.encode_all([f"<|im_start|>{marked}<|im_end|>"], special=False)
    first, *inner, last = found
    assert [first, last] == [2, 3]
    assert not {*inner} & {0, 1, 2, 3}
    blanks = "".join(map(backend.id_to_token, inner)).replace(BLANK, " ").replace("\u0120", " ")
    assert blanks.strip() == said
    assert ids.encode_all([f"<|im_start|>{said}<|im_end|>"], special=False)[0].count(3) == 2
    assert ids.mark({"a": [said], "b": 7}, ["<s>"]) == {"a": [ids.mark(said, ["<s>"])], "b": 7}


def test_a_text_begins_with_the_tokenizers_token_once_and_never_ends_with_one() -> None:
    ids = TextIds(make("never"))
    bare, own, twice = ids.encode_all(["15", "<s>15", "<s><s>15"], special=True)
    assert bare == own == [0, *ids.encode_all(["15"], special=False)[0]]
    assert twice[:2] == [0, 0]
