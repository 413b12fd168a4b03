"""Ids of texts that go on from others, and of special tokens that are words."""

from __future__ import annotations

import random
import string
from itertools import chain

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from llamarl.model.text_ids import TextIds, unmarked
from tests.random_search import case, searched

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
