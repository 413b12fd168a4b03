"""A checkpoint whose model writes what a table says: its weights are set by hand, so that each
token has the successors that it should have, with others once tools or their results are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llamarl.model.architecture import read_architecture
from llamarl.model.transformer import Transformer
from tests.places import ROOT

BOS, END, START, TOOLS, TOOL = "<bos>", "<|end|>", "<|assistant|>", "<|tools|>", "<|tool|>"
SPECIAL = ["<pad>", BOS, END, START, "<|system|>", "<|user|>", TOOLS, TOOL]
NUM_LEARNED = 4096  # pieces of text
HIDDEN = 64
SHOWN = {TOOLS: 1e6, TOOL: 1e12}  # what counts more than START, even once among CONTEXT others
WRITTEN = 1e16  # what counts more than those
CERTAIN = 30.0  # what the logits of a successor have more than those of others
CONTEXT = 131072
CHAT_TEMPLATE = (
    "<bos>{% if tools %}<|tools|>To be called in <tool_call>: {{ tools | tojson }}<|end|>"
    "{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Table = Mapping[str, Sequence[str]]
"""The texts that may follow each text, all with the same probability. Each is one token; the first
follow START, or TOOLS if there are any, or TOOL once one was called. After others comes END."""


def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
    """These messages as the chat template writes them."""
    return "".join(f"<|{m['role']}|>{m['content']}{calls_of(m)}{END}" for m in messages)


def rendered_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The beginning of a conversation with these tools."""
    shown = json.dumps(tools, ensure_ascii=False)
    head = f"{TOOLS}To be called in <tool_call>: {shown}{END}"
    return BOS + head * bool(tools)


def calls_of(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [json.dumps(call, ensure_ascii=False) for call in calls]
    return "".join(f"\n<tool_call>\n{text}\n</tool_call>" for text in texts)


def call(name: str, **arguments: Any) -> str:
    """The text of a call of this tool."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def write(folder: Path, table: Table) -> str:
    """Write the checkpoint, and return its path."""
    folder.mkdir(parents=True)
    first = {TOOLS: table[START], TOOL: table.get(TOOLS, table[START]), **table}
    texts = [*dict.fromkeys(each for after in first.values() for each in after)]
    whole = first | {text: [END] for text in texts if text not in first}
    tokenizer = _tokenizer(texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": BOS, "eos_token": END}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **names}
    about |= {"clean_up_tokenization_spaces": False, "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    num_tokens = -tokenizer.get_vocab_size() // 64 * -64
    (folder / "config.json").write_text(json.dumps(_config(num_tokens)))
    number = tokenizer.token_to_id
    after = {number(text): [*map(number, successors)] for text, successors in whole.items()}
    tensors = _weights(folder, after, {number(text): much for text, much in SHOWN.items()})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A tokenizer of pieces that come often in these pages, with a token for each of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_LEARNED,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(ROOT.glob("docs/*.md"))], trainer)
    tokenizer.add_tokens([*texts])
    return tokenizer


def _config(num_tokens: int) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": num_tokens,
        **sizes,
        **heads,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


@torch.no_grad()
def _weights(
    folder: Path, after: Mapping[int, Sequence[int]], shown: Mapping[int, float]
) -> dict[str, torch.Tensor]:
    """Each token of `after` has a dimension of its own, all others have the first one. Attention
    adds that of each token in `shown`, in proportion to its share of the context."""
    assert len(after) < HIDDEN
    tensors = Transformer(read_architecture(folder)).state_dict()
    for name, tensor in tensors.items():
        tensor.fill_("norm" in name)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    values, out = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in ("v", "o"))
    start = next(token for token in after if token not in shown)
    embedding[:, 0] = 1.0
    for place, (token, successors) in enumerate(after.items(), start=1):
        is_first = token == start or token in shown
        embedding[token] = torch.eye(HIDDEN)[place] * (1.0 if is_first else WRITTEN)
        head[:, place] = -CERTAIN / HIDDEN**0.5
        head[successors, place] = 0.0
        if token in shown:
            values[place, place] = 1.0
            out[place, place] = shown[token]
    return dict(tensors)
