"""Drawing tokens: exact frequencies, exact log-probs, independent streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llamarl.generator.engine.sampling import SamplingRows, sample, uniforms

NUM = 40000


def exact(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The distribution by its definition, token by token."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs = np.where(probs < min_p * probs.max(), 0, probs)
    order = np.argsort(-probs, kind="stable")[: np.count_nonzero(probs)]
    kept = list(order[:top_k] if top_k else order)
    total = probs[kept].sum()
    nucleus, mass = [], 0.0
    for token in kept:
        if top_p < 1 and mass >= top_p:
            break
        nucleus.append(token)
        mass += probs[token] / total
    result = np.zeros_like(probs)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


def rows(
    num: int, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> SamplingRows:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num, 1), value, dtype=dtype)

    return SamplingRows(
        temperature=column(temperature, torch.float32),
        greedy=None,
        top_k=column(top_k, torch.int64) if top_k else None,
        top_p=column(top_p, torch.float32) if top_p < 1 else None,
        min_p=column(min_p, torch.float32) if min_p else None,
    )


@pytest.mark.parametrize("vocab", [13, 64, 300])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        *((1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.7, 9, 1.0, 0.0), (1.0, 0, 0.8, 0.0)),
        *((1.2, 10, 0.7, 0.0), (1.0, 0, 1.0, 0.2), (1.3, 10, 0.8, 0.1)),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_distribution(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(vocab).normal(size=vocab, scale=1.5).astype(np.float32)
    batch = torch.from_numpy(logits).expand(NUM, vocab).clone()
    uniform = torch.from_numpy(uniforms(vocab, NUM)).unsqueeze(1)
    ids, logprobs, kept = sample(batch, rows(NUM, temperature, top_k, top_p, min_p), uniform, 12)
    probs = exact(logits, temperature, top_k, top_p, min_p)
    if np.count_nonzero(probs) <= 12:
        assert {*kept[0].tolist()} - {-1} == {*np.flatnonzero(probs).tolist()}
        assert (kept == kept[0]).all()
    np.testing.assert_allclose(logprobs.numpy(), np.log(probs[ids.numpy()]), atol=1e-5)
    counts = np.bincount(ids.numpy(), minlength=vocab)
    assert counts[probs == 0].sum() == 0
    likely = probs * NUM > 5
    wanted = probs[likely] * NUM
    statistic = ((counts[likely] - wanted) ** 2 / wanted).sum()
    freedom = likely.sum() - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_greedy_rows_take_the_likeliest_token_and_its_logprob_at_temperature_one() -> None:
    logits = torch.randn(50, 40)
    greedy = torch.arange(50).unsqueeze(1) % 2 == 0
    kinds = SamplingRows(temperature=None, greedy=greedy, top_k=None, top_p=None)
    uniform = torch.from_numpy(uniforms(0, 50)).unsqueeze(1)
    ids, logprobs, _ = sample(logits.clone(), kinds, uniform)
    every = torch.log_softmax(logits, -1)
    assert ids[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert ids[1::2].tolist() != logits[1::2].argmax(-1).tolist()
    torch.testing.assert_close(logprobs, every.gather(1, ids.unsqueeze(1)).squeeze(1))


def test_extreme_uniforms_never_pick_an_impossible_token() -> None:
    for vocab in (5, 37, 128, 1000):
        logits = torch.full((4, vocab), -torch.inf)
        logits[:, vocab // 2] = 0.0
        logits[:, vocab // 3] = -3.0
        edge = torch.tensor([0.0, 1 - 2.0**-23, 0.5, 2.0**-23]).unsqueeze(1)
        kinds = SamplingRows(temperature=None, greedy=None, top_k=None, top_p=None)
        ids, logprobs, _ = sample(logits, kinds, edge)
        assert set(ids.tolist()) <= {vocab // 2, vocab // 3}
        assert torch.isfinite(logprobs).all()


def test_running_sums_that_step_up_without_mass_never_lead_to_an_impossible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a GPU may, by a rounding; here by so much that it would be seen."""
    cumsum = torch.Tensor.cumsum

    def shaken(masses: torch.Tensor, dim: int) -> torch.Tensor:
        return cumsum(masses, dim) + 0.05 * (torch.arange(masses.shape[dim]) % 2)

    monkeypatch.setattr(torch.Tensor, "cumsum", shaken)
    logits = torch.full((4096, 1000), -torch.inf)
    logits[:, [3, 400, 998]] = 0.0
    uniform = torch.arange(4096).unsqueeze(1) / 4096
    kinds = SamplingRows(temperature=None, greedy=None, top_k=None, top_p=None)
    ids, logprobs, _ = sample(logits, kinds, uniform)
    assert set(ids.tolist()) == {3, 400, 998}
    torch.testing.assert_close(logprobs, torch.full((4096,), -np.log(3.0), dtype=torch.float32))


def test_streams_are_uniform_and_independent() -> None:
    table = np.stack([uniforms(seed, 64) for seed in range(2000)])
    assert table.min() >= 0
    assert table.max() < 1
    counts, _ = np.histogram(table, bins=50, range=(0, 1))
    wanted = table.size / 50
    assert ((counts - wanted) ** 2 / wanted).sum() < 49 + 4 * 98**0.5
    centred = table - 0.5
    for shifted in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        # The product of two independent uniforms has mean 0 and deviation 1/12.
        assert abs(shifted.mean()) < 4 / 12 / shifted.size**0.5


def test_a_stream_depends_on_seed_and_index_alone() -> None:
    assert uniforms(5, 10).tolist() == uniforms(5, 100)[:10].tolist()
    assert uniforms(5, 10).tolist() != uniforms(6, 10).tolist()
    assert uniforms(-1, 4).tolist() == uniforms(2**64 - 1, 4).tolist()
