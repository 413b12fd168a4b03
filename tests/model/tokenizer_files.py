"""Writes the files of a small byte-level tokenizer, as transformers does."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<bos>", "<eos>", "<pad>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(
    folder: Path,
    *,
    chat: bool = False,
    eos: bool = True,
    generation_eos: int | list[int] | None = None,
) -> Path:
    """One id per byte after the three special ones; BOS is put before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    names = {"bos_token": "<bos>", "pad_token": "<pad>"} | ({"eos_token": "<eos>"} if eos else {})
    files = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE if chat else None, **names
    )
    files.save_pretrained(folder)
    if generation_eos is not None:
        text = json.dumps({"eos_token_id": generation_eos})
        (folder / "generation_config.json").write_text(text)
    return folder
