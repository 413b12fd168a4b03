"""Chat templates in the forms of model families, and a small tokenizer that has one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from llamarl.model import tokenizer as loading

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
# Only of turns after the last question is thinking shown, of the last one even if there is none, as
# in Qwen 3; in 3.5 and 3.6 of all of those, and the next turn begins within it.
AFTER_QUESTION = (
    HEAD + "{% set ns = namespace(last_query_index=messages|length - 1, seeks=true) %}"
    "{% for m in messages[::-1] %}{% if ns.seeks and m.role == 'user' %}{% set ns.seeks = false %}"
    "{% set ns.last_query_index = messages|length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set parts = m.content.split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last_query_index and SHOWN %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ parts[-1].lstrip('\n') }}"
    + CALLS
    + "<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = AFTER_QUESTION.replace("SHOWN", "(loop.last or thought)")
QWEN35 = AFTER_QUESTION.replace("SHOWN", "true").replace(
    "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
)
# The last turn has another end than an earlier one, which is none for a completion, as in gpt-oss.
ANOTHER_END = (
    "{% for m in messages %}<|start|>{{ m.role }}<|header|>{{ m.content }}"
    "{{ '<|eot|>' if loop.last and not add_generation_prompt and m.role == 'assistant' "
    "else '<|begin|>' }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# A turn ends with the token by which the next one begins, as in GLM-4.5.
NEXT_ROLE = (
    "{% for m in messages %}{{ {'user': '<|im_end|>', 'tool': '<|eom|>', 'assistant': '<|start|>'}"
    "[m.role] }}\n{% if m.role == 'assistant' and '</think>' not in m.content %}<think></think>\n"
    "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}"
)
# What is not to be gone on with ends with a token of its own, as in Phi-3.
END_OF_ALL = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|start|>assistant\n' if add_generation_prompt else '<|eot|>' }}"
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


def write_tokenizer(
    folder: Path, template: str, special: Sequence[str] = SPECIAL, ends: Sequence[str] = ENDS
) -> loading.Tokenizer:
    """A tokenizer whose characters are one token each, with `template`; any of `ends` ends a turn,
    and the first is its own."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = [chr(code) for code in range(32, 127)] + ["\n", "é"]
    vocabulary = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": ends[0],
        "bos_token": special[0],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = {"eos_token_id": [vocabulary[end] for end in ends]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return loading.load_tokenizer(folder)
