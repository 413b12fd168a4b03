"""The tokenizer of `recipes/quickstart_tools` with what TRL asks of one that calls tools.

Both environments import it. A run renders and reads with it what llamarl does with the recipe's
own; tests/scoring/test_peers.py compares the two.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

CONTENT = "{{ message.content }}"  # all that the recipe's template renders of a message
# TRL renders calls only to see whether a template can: those of a run keep the ids of the model.
CALLS = (
    CONTENT + "{% for call in message.tool_calls or [] %}<{{ call.function.name }}>"
    "{% set values = call.function.arguments %}"
    "{{ values.expression if 'expression' in values else values | tojson }}"
    "</{{ call.function.name }}>{% endfor %}"
)
RESPONSE_TEMPLATE = {  # `environment.calls=tagged`, for the one tool of the recipe
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<(?P<name>calculator)>",
            "close_pattern": r"</calculator>|(?=<\|end\|>)|\Z",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": {"expression": "{content}"}},
            },
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def load_tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer, which can also render and read calls."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = tokenizer.chat_template.replace(CONTENT, CALLS)
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer
