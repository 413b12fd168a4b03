"""The tokenizer, which turns text into token ids and back, by the files of a checkpoint folder."""

from __future__ import annotations

import os
import shutil
import string
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jinja2 import TemplateError

from llamarl.core.fields import require
from llamarl.core.files import read_object, whole_letters
from llamarl.model.text_ids import MOST_CHARS, MOST_GROWTH, TextIds, bounded, growth, has_powers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


ASSISTANT = "assistant"
MAX_REASON_CHARS = 300
MOST_BYTES = 4  # of a character in UTF-8: more tokens than that do not make one
IMPORTING = threading.Lock()
"""Held while transformers is imported: it finds its names on first use, which two threads must not
do at once."""

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "user", "content": "..."}."""


class TextDecoder(Protocol):
    """The part of a tokenizer that the controller needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a completion."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of special tokens, which `decode` leaves out, by their texts."""

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of these ids."""


class Tokenizer:
    """The tokenizer of one checkpoint; make it with `load_tokenizer`. The tokenizer's own
    end-of-sequence id is the first of `eos_token_ids`; `num_ids` is its largest id plus one."""

    def __init__(
        self,
        backend: PreTrainedTokenizerFast,
        folder: str,
        eos_token_ids: tuple[int, ...],
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self.eos_token_ids = eos_token_ids
        self.special_ids = {
            token.content: i for i, token in backend.added_tokens_decoder.items() if token.special
        }
        self.max_token_chars = max(map(len, backend.get_vocab()), default=1)
        """The most characters of a text that one token stands for."""
        self.num_ids = max(backend.get_vocab().values(), default=-1) + 1
        self._backend, self._template_kwargs = backend, dict(template_kwargs)
        self._ids = TextIds(backend.backend_tokenizer)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, including added ones."""
        return self._backend.get_vocab()

    @property
    def has_chat_template(self) -> bool:
        return self._backend.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The text of the chat template, empty if there is none."""
        return str(self._backend.chat_template or "")

    @property
    def response_template(self) -> object:
        """The tokenizer's own template for reading answers; None if it has none."""
        return getattr(self._backend, "response_template", None)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of `text`; `special` puts the tokenizer's special tokens, such as
        BOS, before it, unless it begins with them.

        A rendered chat holds them already: encode it with `special=False`."""
        return self.encode_all([text], special=special)[0]

    def encode_all(
        self, texts: Sequence[str], *, special: bool = True, before: Sequence[str] = ()
    ) -> list[list[int]]:
        """Return the token ids of many texts, several times as fast as one by one. `before` has the
        text that each one continues, "" for one that begins: many tokenizers put a blank where a
        text begins."""
        return self._ids.encode_all([*map(whole_letters, texts)], special=special, before=before)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `token_ids` without special tokens (end of sequence, padding, ...)."""
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text = self._backend.decode(ids, **options)
        assert isinstance(text, str)
        return text

    def decode_raw(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `token_ids` with special tokens."""
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        text = self._backend.decode(ids, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def pieces(self, token_ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the text of each token as it stands among these; together they are the text of
        `decode_raw`. A character of several tokens stands with its last one, and the others are
        empty."""
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        texts, known = [""] * len(ids), dict[tuple[int, ...], str]()
        decode = self._backend.backend_tokenizer.decode  # `decode_raw`, without what takes longer

        def text_of(begin: int, end: int) -> str:
            key = tuple(ids[begin:end])
            if key not in known:
                known[key] = decode(list(key), skip_special_tokens=False)
            return known[key]

        begin = read = 0  # a token is read after the ones before it: some lose a blank at the start
        for end in range(1, len(ids) + 1):
            before, now = text_of(begin, read), text_of(begin, end)
            is_whole = not now.endswith("\ufffd") or end - read > MOST_BYTES
            if is_whole or end == len(ids):
                texts[end - 1] = now[len(before) :]
                begin, read = read, end
        return texts

    def parse_response(self, token_ids: Sequence[int] | np.ndarray) -> Mapping[str, Any]:
        """Return the message that these ids are, by the tokenizer's response template; empty if
        they do not fit it."""
        try:
            message = self._backend.parse_response(np.asarray(token_ids, np.int64).tolist())
        except Exception:  # noqa: BLE001 - whatever the model wrote, and the template is a program
            return {}
        return message if isinstance(message, dict) else {}

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        is_open: bool = True,
        goes_on: bool = False,
    ) -> str:
        """Return the conversation as one text that ends where the assistant's answer begins, or, if
        it is not open, with the last message, or, if that `goes_on`, with its words. `tools` are
        the schemas of the tools that the assistant may call.

        A special token that stands in a message or a schema, as in a question about them, is text
        and gets no id of its own: it is marked in the result (`text_ids.py`). In the assistant's
        messages only tokens that end a completion are marked.

        It needs `has_chat_template`. Raises ValueError, in one line, if the template refuses the
        messages (many refuse a system message, or two turns of one role), cannot join them, or
        takes too much time or memory."""
        conversation = [self._marked(message) for message in messages]
        try:
            if has_powers(self.chat_template):
                raise TemplateError("it raises numbers to powers")
            with bounded():
                text = self._backend.apply_chat_template(
                    conversation,
                    tools=self._ids.mark([*tools], self.special_ids.keys()) or None,
                    tokenize=False,
                    add_generation_prompt=is_open and not goes_on,
                    continue_final_message=goes_on,
                    **self._template_kwargs,
                )
        except Exception as error:  # noqa: BLE001 - the template is a program of the checkpoint's
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
            must = f"suit the chat template of {self.folder}"
            raise ValueError(f"the messages must {must}, got: {kind}{reason}") from None
        assert isinstance(text, str)
        must = f"be rendered by {self.folder} as {MOST_CHARS:,} characters at most"
        require(len(text) <= MOST_CHARS, "the messages", must, f"{len(text):,}")
        return text

    def end_of_answer(self) -> str | None:
        """Return the special token with which the chat template ends an answer; None if it has
        none, or refuses a plain question and answer."""
        answer = "zqxj"  # which no template has
        chat = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": answer}]
        try:
            text = self.render_chat(chat, is_open=False)
        except ValueError:
            return None
        _, _, rest = text.rpartition(answer)
        places = {token: rest.find(token) for token in self.special_ids if token in rest}
        return min(places, key=places.__getitem__, default=None)

    def _marked(self, message: Message) -> dict[str, Any]:
        """Return the message, with the special tokens that stand in it marked as text."""
        is_own = message["role"] == ASSISTANT
        ends = {text for text, i in self.special_ids.items() if i in self.eos_token_ids}
        some = ends if is_own else self.special_ids.keys()
        return {key: self._ids.mark(value, some) for key, value in message.items()}


def load_tokenizer(
    folder: str | Path,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    day: str | None = None,
) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder (tokenizer.json and the files beside it). Its chat
    template gets `template_kwargs` beside the messages, and this `day` for today's, if there is
    one.

    The ids of `eos_token_id` in generation_config.json, if it exists, are added to the tokenizer's
    own. Raises ValueError if a file is missing or damaged or there is no end-of-sequence id.
    """
    path = Path(folder)
    file = path / "tokenizer.json"
    require(os.path.isdir(path), "the tokenizer folder", "exist", str(path))
    if not file.is_file():
        raise ValueError(
            f"the tokenizer folder must hold tokenizer.json (transformers writes it with "
            f"AutoTokenizer.from_pretrained(...).save_pretrained(...)), got {str(path)!r} without"
        )
    values = read_object(file)
    model = values.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ValueError(f"{file} must hold a model with a 'vocab', got none")
    for name in ("normalizer", "decoder"):
        if (times := growth(values.get(name))) > MOST_GROWTH:
            must = f"have a {name} that makes a text at most {MOST_GROWTH} times as long"
            raise ValueError(f"{file} must {must}, got {times:.3g} times")
    if (path / "tokenizer_config.json").exists():
        read_object(path / "tokenizer_config.json")

    with IMPORTING:
        from transformers import PreTrainedTokenizerFast

    try:
        backend = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        backend.encode("1")  # settings of a wrong type fail at the first text only
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        must = "be a tokenizer that transformers loads"
        raise ValueError(f"{file} must {must}, got {reason}") from None
    if day is not None:
        backend.chat_template = on_day(backend.chat_template, day)
    eos_token_ids = _eos_token_ids(path, backend.eos_token_id)
    return Tokenizer(backend, str(path), eos_token_ids, template_kwargs)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer has an id that is outside a model's `vocab_size` rows.

    The model may have more rows than the tokenizer has ids: checkpoints pad their embeddings.
    """
    largest = max(tokenizer.num_ids - 1, *tokenizer.eos_token_ids)
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer must fit the model's vocabulary of {vocab_size} tokens, got token id "
            f"{largest} from {tokenizer.folder}; set model.tokenizer to the tokenizer the "
            f"checkpoint was trained with"
        )


def check_teacher(tokenizer: Tokenizer, teacher: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError unless every id of the policy's tokenizer is the same token for the teacher,
    a model with `vocab_size` rows, whose own tokenizer may have more."""
    own, others = tokenizer.vocabulary, teacher.vocabulary
    differing = next((token for token, i in own.items() if others.get(token) != i), None)
    if differing is not None:
        got = f"{differing!r} is {own[differing]} and {others.get(differing, 'missing')}"
        must = f"have the tokens of the policy's tokenizer ({tokenizer.folder})"
        raise ValueError(f"algorithm.teacher must {must}, got {teacher.folder}, where {got}")
    must = f"have a row for each of the {tokenizer.num_ids} ids of its tokenizer"
    require(vocab_size >= tokenizer.num_ids, "algorithm.teacher", must, vocab_size)


def split_stops(
    tokenizer: TextDecoder, texts: Sequence[str], key: str = "sampling.stop_strings"
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids of the stop strings that are a special token each, and the other stop strings.

    Raises ValueError for one that has a special token among other characters: as the text of a
    rollout shows no special token, it would never end one."""
    special = tokenizer.special_ids
    others = [text for text in texts if text not in special]
    for text in others:
        found = next((token for token in special if token in text), None)
        must = f"hold a special token, such as {found!r}, by itself or not at all"
        require(found is None, key, must, text)
    return tuple(special[text] for text in texts if text in special), tuple(others)


def _eos_token_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    listed = read_object(path).get("eos_token_id") if path.exists() else None
    ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
    is_sound = all(type(i) is int and i >= 0 for i in ids)
    require(is_sound, f"eos_token_id of {path}", "be a token id or a list of them", ids)
    both = ([] if own is None else [own]) + ids
    if not both:
        where = f"eos_token in {folder / 'tokenizer_config.json'}"
        raise ValueError(f"the tokenizer must have an end-of-sequence token ({where}), got none")
    return tuple(dict.fromkeys(both))


TODAY = "strftime_now"  # by which a template says the day
PERCENT = "\ufdd1"  # of no character: it stands for %% while directives are replaced


def on_day(template: Any, day: str) -> Any:
    """Return a template, several by name, or None, with a `strftime_now` of its own, in which it is
    always the beginning of this day (ISO). transformers gives templates no function of the
    caller's."""
    if isinstance(template, dict):
        return {name: on_day(text, day) for name, text in template.items()}
    if not isinstance(template, str):
        return template
    start = datetime.fromisoformat(day)
    directives = [f"%{flag}{each}" for flag in ("", "-") for each in string.ascii_letters]
    texts = {each: start.strftime(each) for each in directives}
    texts = {"%%": PERCENT} | {key: text for key, text in texts.items() if text != key}
    pairs = [*texts.items(), (PERCENT, "%")]
    steps = "".join(f"|replace({key!r}, {text!r})" for key, text in pairs)
    macro = f"{{%- macro {TODAY}(format) -%}}{{{{- format{steps} -}}}}{{%- endmacro %}}"
    return f"{macro}\n{template}"  # the template begins a line, as before; Jinja drops the break


TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates",
)
"""The patterns of a tokenizer's files; an export has them too."""
END_FILE = "generation_config.json"  # may name ids that end a sequence
TOKENIZER_FOLDER = "tokenizer"  # of a run's folder


def copy_files(source: str | Path, patterns: Iterable[str], folder: Path) -> None:
    """Copy the files of `source` that match a pattern into `folder`, which exists, over what is
    there."""
    for pattern in patterns:
        for path in Path(source).glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            elif path.is_file():  # a tokenizer loads without what cannot be read
                shutil.copyfile(path, folder / path.name)


def tokenizer_files(folder: str | Path) -> list[Path]:
    """Return the tokenizer's files in a folder, in one order."""
    paths = {path for pattern in TOKENIZER_FILES for path in Path(folder).glob(pattern)}
    inner = {path for each in paths if each.is_dir() for path in each.rglob("*")}
    return sorted(path for path in paths | inner if path.is_file())


def keep_tokenizer(source: str | Path, run_dir: str | Path) -> None:
    """Copy a tokenizer into the folder of a run. Raises OSError if the disk is full."""
    folder = Path(run_dir, TOKENIZER_FOLDER)
    folder.mkdir(exist_ok=True)
    copy_files(source, (*TOKENIZER_FILES, END_FILE), folder)
