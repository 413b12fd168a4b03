"""Chat templates in the forms of model families, and a small tokenizer that has one of them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from llamarl.data import tokenizer as loading

HEAD = (
    "{% if tools %}<|im_start|>system\nTools in <tool_call>: {{ tools | tojson }}<|im_end|>\n"
    "{% endif %}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
)
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Results of one turn are one user message, as in Qwen 2.5 and 3.
QWEN = (
    HEAD + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thinking of a turn that a user's message follows is left out, as in Qwen 3.
THINKING = (
    HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}" + END
)
# A result is JSON, and follows a single call, as in Llama 3.
LLAMA = (
    "<|begin|>{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '<|start|>assistant<|header|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot|>"
    "{% elif m.role == 'tool' %}<|start|>ipython<|header|>\n\n{{ m.content | tojson }}<|eot|>"
    "{% else %}<|start|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|eot|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|header|>\n\n{% endif %}"
)
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + END
# What a template must not do.
NUMBERED = "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}" + END
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}{% endif %}" + END
)
SILENT = (
    "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}" + END
)
WITHOUT_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REFUSING = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + END
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|header|>", "<|eot|>"]
SPECIAL += ["<|python_tag|>", "<|eom|>"]
ENDS = ["<|im_end|>", "<|eot|>", "<|eom|>"]


def write_tokenizer(folder: Path, template: str) -> loading.Tokenizer:
    """A tokenizer whose characters are one token each, with `template`; three tokens end a turn."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = [chr(code) for code in range(32, 127)] + ["\n", "é"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = {"eos_token_id": [vocabulary[end] for end in ENDS]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return loading.load_tokenizer(folder)
