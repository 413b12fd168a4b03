"""What a rollout should be, by loops over transformers' models: the oracle of a random search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llamarl.core.records import FinishReason, Request, Sampling
from llamarl.generator.engine.sampling import uniforms
from llamarl.generator.protocol import PartialOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_TOLERANCE = 6e-5
"""Engine and transformers add float32 numbers in different orders. Measured over 118,000 tokens,
log-probs times the temperature, where that is below 1, differ by at most 2.4e-5. What engines that
were broken on purpose wrote (an older version, a prompt one position short) differed by 0.03 to
0.3."""


Feed = Callable[["PreTrainedModel", Sequence[int], Any], np.ndarray]
"""What a model finds out about tokens that follow those in the cache: [tokens, ...]."""


def each_by(
    models: Mapping[int, PreTrainedModel],
    tokens: Sequence[int],
    labels: Sequence[int],
    recomputes: bool,
    feed: Feed,
) -> np.ndarray:
    """What `feed` finds for the last n of `tokens`, each by the version in `labels` [n]: [n, ...].

    A version reads keys and values that those before it wrote, or with `recomputes` its own ones.
    What was there before the n tokens is read by the first of the versions.
    """
    from transformers import DynamicCache

    cache, num_fed = DynamicCache(), 0
    stop = len(tokens) - len(labels) - 1
    found = []
    for version, run in groupby(labels):
        count = len(list(run))
        if recomputes:
            cache, num_fed = DynamicCache(), 0
        stop += count
        found.append(feed(models[version], tokens[num_fed:stop], cache)[-count:])
        num_fed = stop
    return np.concatenate(found)


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Sequence[int], cache: Any) -> np.ndarray:
    """Logits float64 [tokens, vocab]."""
    logits: torch.Tensor = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
    return logits.double().numpy()


def check_token(
    logits: np.ndarray, token: int, logprob: float, uniform: float, sampling: Sampling
) -> None:
    """`token` is what `uniform` draws after temperature, top-k and top-p, in the order of ids, or
    the likeliest one; `logprob` is the one of that distribution.

    Where rounding decides what top-k and top-p keep, the smaller and the larger set are allowed.
    """
    scaled = logits / (sampling.temperature or 1.0)
    scaled -= scaled.max()
    near = LOGIT_TOLERANCE / min(sampling.temperature or 1.0, 1.0)
    order = np.argsort(-scaled, kind="stable")
    fewest = np.zeros(len(scaled), bool)
    fewest[order[: sampling.top_k or None]] = True
    most = scaled >= scaled[fewest].min() - near
    if sampling.top_p < 1:
        masses = np.exp(scaled) * fewest
        before = np.empty_like(masses)
        before[order] = (np.cumsum(masses[order]) - masses[order]) / masses.sum()
        fewest = fewest & (before < sampling.top_p - near)
        fewest[order[0]] = True
        most = most & (before < sampling.top_p + near)
    assert most[token], "top-k or top-p leaves the token out"
    logprobs, ends = [], []
    for kept in (fewest, most):
        masses = np.exp(scaled) * kept
        running = np.cumsum(masses) / masses.sum()
        ends += [running[token] - masses[token] / masses.sum(), running[token]]
        logprobs.append(scaled[token] - np.log(masses.sum()))
    assert min(logprobs) - near <= logprob <= max(logprobs) + near, (logprobs, logprob)
    if sampling.temperature == 0:
        assert scaled[token] >= -near, "another token is likelier"
    else:
        assert min(ends) - near <= uniform <= max(ends) + near, (ends, uniform)


def check_tokens(
    models: Mapping[int, PreTrainedModel],
    request: Request,
    ids: Sequence[int],
    logprobs: np.ndarray,
    labels: Sequence[int],
    recomputes: bool,
    chain: Sequence[int],
) -> None:
    """The last tokens of a response of these `ids`, as many as there are `labels`, have the ids and
    log-probs that the models of `labels` give them. `chain` ends with these: the versions by which
    the keys and values before the last tokens were computed."""
    if not labels:
        return
    first = len(ids) - len(labels)
    rows = each_by(models, [*request.prompt_ids, *ids], chain, recomputes, logits_of)
    rows = rows[-len(labels) :]
    draws = uniforms(request.seed, len(ids))[first:]
    for place, row in enumerate(rows, first):
        logprob, draw = float(logprobs[place]), float(draws[place - first])
        check_token(row, ids[place], logprob, draw, request.sampling)


@torch.no_grad()
def routers_by(model: PreTrainedModel, tokens: Sequence[int], cache: Any = None) -> np.ndarray:
    """The routers' probabilities float64 [tokens, layers, experts] of these tokens, which follow
    those in the cache."""
    found = model(
        torch.tensor([tokens]), past_key_values=cache, output_router_logits=True
    ).router_logits
    return torch.stack(found, 1).double().softmax(-1).numpy()


def are_likeliest(probs: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Of tokens with `probs` [n, layers, experts]: whether the experts `chosen` [n, layers, k] are
    different ones and no other is likelier than them by more than rounding."""
    taken = np.zeros(probs.shape, bool)
    np.put_along_axis(taken, chosen.astype(np.int64), True, axis=-1)
    least = np.where(taken, probs, np.inf).min(-1)
    most = np.where(taken, -np.inf, probs).max(-1)
    is_whole = taken.sum(-1) == chosen.shape[-1]
    return (is_whole & (least >= most - LOGIT_TOLERANCE)).all(-1)


def check_experts(
    models: Mapping[int, PreTrainedModel],
    request: Request,
    written: PartialOutput,
    before: PartialOutput,
    recomputes: bool,
    chain: Sequence[int],
) -> None:
    """The record of the experts has what it had `before`, and of the tokens that were fed since
    those that the models choose: behind each of them the model that wrote the next token, and for a
    prompt's others one of those that computed it. `chain` as in `check_tokens`."""
    num_before = len(before.experts)
    assert written.experts[:num_before].tobytes() == before.experts.tobytes()
    new = written.versions[len(before.ids) :].tolist()
    if not new or not hasattr(models[new[-1]].config, "num_experts"):
        return
    tokens = [*request.prompt_ids, *written.ids.tolist()]
    assert len(written.experts) == len(tokens) - 1
    # The tokens behind which one was written, as they were fed.
    start = len(tokens) - 1 - len(chain)
    found = each_by(models, tokens, chain, recomputes, routers_by)
    first = max(num_before, len(tokens) - 1 - len(new))
    good = are_likeliest(found[first - start :], written.experts[first:])
    assert good.all(), f"experts of tokens {[*np.flatnonzero(~good) + first]}"
    # Observations and a cut's last token, which were fed before, with all that stands before them.
    between = slice(max(num_before, len(request.prompt_ids) - 1), first)
    if [*chain] == new and between.start < first:
        probs = routers_by(models[new[0]], tokens[:first])
        assert are_likeliest(probs[between], written.experts[between]).all(), "experts between"
    prompt = request.prompt_ids[:-1]
    if len(prompt) > num_before:
        versions = [v for v in models if v >= new[0]] if recomputes else [new[0]]
        each = [
            are_likeliest(routers_by(models[v], prompt), written.experts[: len(prompt)])
            for v in versions
        ]
        assert any(found.all() for found in each), "experts of a prompt"


def first_end(
    request: Request,
    ids: Sequence[int],
    num_before: int,
    context: int,
    decode_text: Callable[[Sequence[int]], str],
    turn: int = 0,
) -> tuple[int, FinishReason] | None:
    """After how many tokens a response that would go on as `ids` ends, and why, once it is resumed
    with `num_before` of them; None if it goes on after the last one. Its present turn begins at
    `turn`."""
    sampling = request.sampling
    most = request.replay_tokens or sampling.max_tokens
    for count in range(num_before + 1, len(ids) + 1):
        text = decode_text(ids[turn:count])
        if ids[count - 1] in sampling.stop_token_ids:
            return count, FinishReason.STOP
        if any(stop in text for stop in sampling.stop_strings):
            return count, FinishReason.STOP
        if count == most or len(request.prompt_ids) + count == context:
            return count, FinishReason.LENGTH
        if count - num_before == request.segment_tokens:
            return count, FinishReason.SEGMENT
    return None
