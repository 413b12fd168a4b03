"""Storage as clients on other hosts reach it: by calls, over a link that may be slow."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from llamarl.core.records import GENERATOR_LOGPROBS, RESPONSE_IDS, TOKEN_VERSIONS
from llamarl.storage.client import MESSAGE_BYTES, Store, Unit
from llamarl.storage.columns import PackedColumns
from tests.unit.stored_rows import NAMES, assert_same, calls_elsewhere, new_unit, rows


async def test_clients_elsewhere_call_in_messages_of_a_limited_size(tmp_path: Path) -> None:
    sizes: list[int] = []
    calls = calls_elsewhere(new_unit(tmp_path), sizes)
    store = Store([Unit("storage-0", calls, str(tmp_path / "nowhere" / "0"))])
    row_ids = list(range(50))
    await store.write(row_ids, rows(row_ids, 100_000))
    assert_same(await store.read(row_ids, NAMES), rows(row_ids, 100_000))
    assert len(sizes) == 18  # six rows in each
    assert max(sizes) < 1.01 * MESSAGE_BYTES
    await store.write([99], rows([99], MESSAGE_BYTES // 8))  # a row is never split
    found, large = await store.read([99, 1], NAMES), rows([99], MESSAGE_BYTES // 8)
    small = rows([1], 100_000)
    assert_same(found, {name: [*large[name], *small[name]] for name in NAMES})


async def test_clients_behind_a_slow_link_write_what_they_write_in_half_the_bytes(
    tmp_path: Path,
) -> None:
    rng, lengths = np.random.default_rng(0), [700, 900, 1100]
    sent = rows([0, 1, 2])
    sent[RESPONSE_IDS] = [rng.integers(0, 128_000, n).astype(np.int32) for n in lengths]
    sent[GENERATOR_LOGPROBS] = [-rng.exponential(0.5, n).astype(np.float32) for n in lengths]
    sent[TOKEN_VERSIONS] = [np.full(n, 7, np.int32) for n in lengths]
    sizes: list[int] = []
    for is_far in (False, True):
        unit = new_unit(tmp_path)
        client = pickle.loads(pickle.dumps(Unit("storage-0", None, "nowhere", is_far=is_far)))
        client._calls = calls_elsewhere(unit, sizes)
        await client.write([0, 1, 2], sent)
        assert_same(await unit.read([0, 1, 2], NAMES), sent)
    assert sizes[1] <= 0.55 * sizes[0]


def test_a_message_is_hardly_larger_than_its_arrays() -> None:
    lengths = np.random.default_rng(0).integers(0, 64, 2000)
    columns = {RESPONSE_IDS: [np.arange(n, dtype=np.int32) for n in lengths]}
    num_bytes, message = 4 * int(lengths.sum()), pickle.dumps(PackedColumns(columns))
    assert len(message) <= num_bytes + 4 * len(lengths) + 500
    assert len(pickle.dumps(columns)) > num_bytes + 20 * len(lengths)  # else why
    assert type(pickle.loads(message)) is dict
