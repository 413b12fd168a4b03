"""A causal language model of the transformers library, on packed rollouts.

No code and no pickle of a checkpoint runs. A rollout's log-probs do not depend on what it is packed
with: where the library cannot promise that, each rollout is a row of its own."""

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from llamarl.core.device.devices import platform_of, send
from llamarl.core.fields import require
from llamarl.core.process_group import largest
from llamarl.model.architecture import causal_families
from llamarl.model.attention import ModelInputs, Packing, make_packing, packed_attention
from llamarl.model.head import LEFT_OUT, TokenStats, token_stats
from llamarl.model.transformer import TrainedModel, recomputed

log = logging.getLogger(__name__)

ATTENTION = "llamarl_packed"  # our name in the library's table of attention functions
HARMLESS = (  # what layers hand on to attention, and it need not know
    "position_ids",
    "position_embeddings",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "is_causal",
)
BUILD_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, ArithmeticError),
    *(ImportError, OSError, RuntimeError, StrictDataclassError),
)
"""The errors of the library for a config.json that it does not know or that is damaged."""
TRIAL_LENGTHS = (11, 7)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest difference, in nats, of log-probs computed in two ways: rounding is below, positions
counted through the pack are above."""
BUILDING = threading.Lock()
"""Held while a model is built: the library imports a family's code on first use, which two threads
must not do at once."""


class TransformersModel(TrainedModel):
    """A model of the library, `causal`, in evaluation mode: dropout would make mu and pi differ.

    Raises ValueError if the library does not know the checkpoint's family, or not as a causal
    language model."""

    def __init__(self, checkpoint: str, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        super().__init__()
        transformers_logging.set_verbosity_error()
        try:
            with BUILDING, torch.device("meta"):
                config = AutoConfig.from_pretrained(
                    checkpoint, local_files_only=True, trust_remote_code=False
                )
                kind = config.model_type
                must = "be a causal language model of text"
                require(kind in causal_families(), "the checkpoint", must, kind)
                # Any other dtype would become the default of all threads of the process meanwhile.
                self.causal = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, trust_remote_code=False
                )
        except BUILD_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"transformers cannot build {checkpoint}: {reason}") from error
        for parameter in self.causal.parameters():
            parameter.data = parameter.data.to(dtype)
        trained = dict(self.causal.named_parameters(remove_duplicate=False))
        others = self.causal.state_dict().keys() - trained.keys()
        must = "have nothing in its files but parameters, which are trained"
        require(not others, f"a {kind}", must, min(others, default=""))
        self.causal.eval()
        self._compute_dtype = compute_dtype
        kinds = set(self.causal._no_split_modules or ())
        self._layers = [each for each in self.causal.modules() if type(each).__name__ in kinds]
        self._own_attention = config._attn_implementation
        self._is_packed = self._takes_packing()
        self._is_head_plain = True

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters by the library's names, which are those of the files."""
        return self.causal.named_parameters(*args, **kwargs)

    def to_empty(self, *, device: Any, recurse: bool = True) -> "TransformersModel":
        """Allocate memory as any module does, and keep tied weights tied."""
        super().to_empty(device=device, recurse=recurse)
        self.causal.tie_weights()
        return self

    @property
    def root(self) -> nn.Module:
        return self.causal

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self._layers

    def set_checkpointing(self, checkpointing: str) -> None:
        for layer in self.layers:
            layer.forward = partial(recomputed, checkpointing, layer.forward)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the buffers, and find out how packed rollouts and the head are to be computed."""
        for tensor in self.causal.buffers():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for parameter in self.causal.parameters():
            parameter._is_hf_initialized = True
        for module in self.causal.modules():
            module._is_hf_initialized = False
        self.causal.initialize_weights()  # of what has no mark: the buffers
        for name, tensor in self.causal.named_buffers():
            if tensor.is_floating_point() and tensor.isnan().any():
                raise ValueError(f"every buffer must follow from config.json, got none for {name}")
        self._choose()

    def forward(self, inputs: ModelInputs, temperature: float) -> TokenStats:
        chosen, targets, kept = inputs.chosen, inputs.targets, inputs.kept
        if self._is_packed:
            positions = inputs.packing.positions[None]
            given: dict[str, Any] = {"position_ids": positions, "packing": inputs.packing}
            if chosen is not None:
                targets = targets.index_select(0, chosen)
                kept = None if kept is None else kept.index_select(0, chosen)
            return self._stats(inputs.token_ids[None], targets, temperature, chosen, kept, **given)
        stats = self._stats_of_rows(inputs, temperature)
        if chosen is None:
            return stats
        return TokenStats(*(column.index_select(0, chosen) for column in stats))

    def _stats_of_rows(self, inputs: ModelInputs, temperature: float) -> TokenStats:
        """Compute each rollout as a row, padded on the right, where nothing reaches it."""
        token_ids, targets, blocks = inputs.token_ids, inputs.targets, inputs.packing.blocks
        num_extra = largest(len(blocks)) - len(blocks)
        parts: list[TokenStats] = []
        places: list[torch.Tensor] = []
        every = torch.arange(len(token_ids), device=token_ids.device)
        for block in blocks:
            tokens = every if block.tokens is None else block.tokens
            cells = every if block.cells is None else block.cells
            rows = token_ids.new_zeros(block.num_rows * block.width)
            rows = rows.index_copy(0, cells, token_ids[tokens]).view(block.num_rows, block.width)
            kept = None if inputs.kept is None else inputs.kept[tokens]
            parts.append(self._stats(rows, targets[tokens], temperature, cells, kept))
            places.append(tokens)
        for _ in range(num_extra):  # the other ranks gather for passes that this one lacks
            extra = self._stats(token_ids[None, :1], targets[:1], temperature)
            parts[0] = TokenStats(*(a + 0 * b for a, b in zip(parts[0], extra, strict=True)))
        back = torch.cat(places).argsort()
        return TokenStats(*(torch.cat(column)[back] for column in zip(*parts, strict=True)))

    def _stats(
        self,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        cells: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        **given: Any,
    ) -> TokenStats:
        """Return the statistics of the tokens at `cells` of `rows` [R, W] (None: all of them),
        whose targets are given."""
        if self._is_head_plain:
            hidden = self.causal.base_model(input_ids=rows, use_cache=False, **given)[0]
            weight = self.causal.get_output_embeddings().weight
            return token_stats(_at(hidden, cells), weight, targets, temperature, kept=kept)
        logits = _at(self.causal(input_ids=rows, use_cache=False, **given).logits, cells)
        return _logit_stats(logits if kept is None else _kept(logits, kept), targets, temperature)

    def _takes_packing(self) -> bool:
        """Return whether every attention of the model calls ours and asks for nothing that it
        lacks, which is tried on the meta device, where an error leaves nothing behind."""
        if getattr(self.causal.config, "attention_chunk_size", None):
            return False  # chunks are in the mask, which ours does not read
        try:
            self.causal.set_attn_implementation(ATTENTION)
            with torch.no_grad(), torch.device("meta"):
                packing = send(make_packing(TRIAL_LENGTHS), torch.device("meta"))
                ids = torch.zeros(1, sum(TRIAL_LENGTHS), dtype=torch.int64)
                given: dict[str, Any] = {"position_ids": packing.positions[None]}
                self.causal(input_ids=ids, use_cache=False, packing=packing, **given)
        except Exception:  # noqa: BLE001 - the library's code for this family may fail in any way
            self.causal.set_attn_implementation(self._own_attention)
            return False
        return True

    def _choose(self) -> None:
        """Compute a few tokens in each way, with these weights and over these ranks. A way that
        does not agree with the library's own, rollout by rollout, is not used."""
        device = next(self.causal.parameters()).device
        vocab_size = self.causal.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(0)
        first, second = TRIAL_LENGTHS
        ids = torch.randint(0, vocab_size, (2 * first + second,), generator=generator).to(device)
        mine = ids[2 * first :]

        def stats(neighbour: torch.Tensor) -> torch.Tensor:
            tokens = torch.cat((neighbour, mine))
            lengths = [len(part) for part in (neighbour, mine) if len(part)]
            packing = send(make_packing(lengths), device)
            return torch.stack(self(ModelInputs(tokens, packing, tokens), 1.0))[:, -second:]

        is_packed, self._is_packed, self._is_head_plain = self._is_packed, False, False
        self.causal.set_attn_implementation(self._own_attention)
        products: list[torch.Tensor] = []
        head = self.causal.get_output_embeddings()
        hook = head.register_forward_hook(lambda *call: products.append(call[2].flatten(0, 1)))
        expected = stats(ids[:0])
        hook.remove()
        limit = TOLERANCES[self._compute_dtype]
        if type(head) is nn.Linear and head.bias is None and products:
            product = torch.stack(_logit_stats(products[0], mine, 1.0))
            self._is_head_plain = True
            found = stats(ids[:0])
            self._is_head_plain = product.equal(expected) and _apart(found, expected) <= limit
        if is_packed:
            self._is_packed = True
            self.causal.set_attn_implementation(ATTENTION)
            found = stats(ids[:first])
            is_alone = found.equal(stats(ids[first : 2 * first]))
            self._is_packed = is_alone and _apart(found, expected) <= limit
        if not self._is_packed:
            self.causal.set_attn_implementation(self._own_attention)
            name = type(self.causal).__name__
            log.warning("rollouts of a %s cannot be packed: each is a padded row", name)


def _at(values: torch.Tensor, cells: torch.Tensor | None) -> torch.Tensor:
    """Return the values at `cells` of [R, W, ...] (None: all): [n, ...]."""
    return values.flatten(0, 1) if cells is None else values.flatten(0, 1)[cells]


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for a layer of the library: [1, heads, N, head_dim] to [1, N, heads, head_dim]. Raises
    NotImplementedError if the layer asks for more than ours computes."""
    del module, attention_mask, dropout  # no mask is made for us, and nothing drops out
    more = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if more:
        raise NotImplementedError(", ".join(more))
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    return packed_attention(q, k, v, packing, scaling, sliding_window)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


def _logit_stats(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> TokenStats:
    """Return the statistics of logits [N, V] that the library has changed after the product: their
    softmax is computed again in the backward pass, a chunk of tokens at a time."""
    size = max(1, platform_of(logits.device).num_logits // logits.shape[1])
    parts = [
        recompute(_softmax_stats, part, target, temperature, use_reentrant=False)
        for part, target in zip(logits.split(size), targets.split(size), strict=True)
    ]
    return TokenStats(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _kept(logits: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the logits [N, V] with all but those of the next tokens `kept` [N, K] left out."""
    rest = torch.full_like(logits, LEFT_OUT, dtype=torch.float32)
    # -1, for none, is moved to the last column of a wider matrix, which is cut off.
    wider = torch.nn.functional.pad(rest, (0, 1), value=LEFT_OUT)
    source = torch.nn.functional.pad(logits.float(), (0, 1), value=LEFT_OUT)
    places = kept % wider.shape[1]
    return wider.scatter(1, places, source.gather(1, places))[:, :-1]


def _softmax_stats(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = (logits.float() / temperature).log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)
