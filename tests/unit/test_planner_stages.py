"""What goes on at once in a publish, and what one after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.config import ClusterConfig, EmbeddedConfig, TrainerConfig, WeightsConfig
from llamarl.planner.hardware import GPUS
from llamarl.planner.simulation.delivery import Delivery, SideRates, delivery
from llamarl.planner.simulation.effort import Effort
from llamarl.planner.simulation.publish import forecast_publish
from llamarl.planner.simulation.publish_rates import PublishRates, publish_rates
from llamarl.planner.simulation.stages import STAGES, Stream, hidden_s, publish_stages
from llamarl.publish.layout import BUFFER, Box, Copy, ParameterLayout, RankLayout
from llamarl.publish.transports.messages import messages
from tests.unit.planner_recipes import LLAMA, make_recipe

SECONDS = st.floats(0, 10)
SHARES = st.floats(0, 1)
RATES = publish_rates(GPUS["H100-80GB"], "cuda")


@given(SECONDS, SECONDS, SECONDS, SECONDS, SHARES, SHARES, st.integers(0, 3), st.booleans())
def test_more_of_any_part_of_a_stream_never_takes_less_time(
    packing: float,
    sending: float,
    receiving: float,
    unpacking: float,
    first: float,
    last: float,
    changed: int,
    overlaps: bool,
) -> None:
    name = ("packing_s", "sending_s", "receiving_s", "unpacking_s")[changed]
    stream = Stream(
        packing_s=packing,
        sending_s=sending,
        receiving_s=receiving,
        unpacking_s=unpacking,
        first=first,
        last=last,
        overlaps=overlaps,
    )
    more = replace(stream, **{name: 1.5 * getattr(stream, name) + 0.1})
    total_s = sum(stream.stages().values())
    assert sum(more.stages().values()) >= total_s - 1e-12
    serial_s = packing + max(sending, receiving) + unpacking
    assert max(packing, sending, receiving, unpacking) <= total_s + 1e-12
    assert total_s <= serial_s + 1e-12 or last * max(sending, receiving) > 0


def test_a_stream_of_many_messages_takes_as_long_as_its_slowest_part() -> None:
    stream = Stream(
        packing_s=4.0, sending_s=10.0, receiving_s=3.0, unpacking_s=2.0, first=0.01, last=0.01
    )
    assert stream.stages() == pytest.approx({"packing": 0.04, "wire": 10.0, "unpacking": 0.02})
    slow = replace(stream, unpacking_s=8.0)
    assert slow.stages() == pytest.approx({"packing": 0.04, "wire": 10.0, "unpacking": 0.08})
    slower = replace(stream, unpacking_s=12.0)
    assert slower.stages() == pytest.approx({"packing": 0.04, "wire": 0.1, "unpacking": 12.0})


def test_sums_are_taken_while_messages_come_but_for_those_of_the_last_round() -> None:
    stream = Stream(
        packing_s=1.0, sending_s=9.0, receiving_s=3.0, unpacking_s=2.0, first=0.0, last=0.25,
        num_rounds=4.0,
    )  # fmt: skip
    assert hidden_s(4.0, stream) == pytest.approx(3.0)
    assert hidden_s(40.0, stream) == pytest.approx(9.5), "no more than the stream takes"
    assert hidden_s(4.0, replace(stream, num_rounds=1.0)) == 0.0
    assert hidden_s(4.0, replace(stream, overlaps=False)) == 0.0


@pytest.mark.parametrize("is_relayed", [False, True])
def test_a_relay_checks_and_commits_again(is_relayed: bool) -> None:
    stages = publish_stages(
        {"packing": 1.0}, phase_s=0.01, verify_s=0.5, commit_s=0.2, relay_s=0.3 * is_relayed
    )
    assert list(stages) == list(STAGES)
    rounds = 1 + is_relayed
    total_s = sum(stages.values())
    assert total_s == pytest.approx(1.0 + 0.3 * is_relayed + rounds * (0.7 + 0.04))


RATE_OF = {
    "moved_bytes": "moved_bytes_per_s",
    "cached_bytes": "cached_bytes_per_s",
    "summed_bytes": "summed_bytes_per_s",
    "read_bytes": "read_bytes_per_s",
    "host_bytes": "host_bytes_per_s",
}


@pytest.mark.parametrize("kind", RATE_OF)
def test_twice_the_rate_halves_its_part_and_no_other(kind: str) -> None:
    rates = PublishRates(
        moved_bytes_per_s=1e9,
        cached_bytes_per_s=2e9,
        summed_bytes_per_s=3e9,
        read_bytes_per_s=4e9,
        host_bytes_per_s=5e9,
    )
    effort = Effort(7, 3, 1, *(10**9 for _ in RATE_OF))
    fast = replace(rates, **{RATE_OF[kind]: 2 * getattr(rates, RATE_OF[kind])})
    saved_s = rates.seconds(effort) - fast.seconds(effort)
    assert saved_s == pytest.approx(rates.seconds(Effort(**{kind: 10**9})) / 2)


def test_a_device_works_while_its_processor_makes_the_next_calls() -> None:
    calls, work = Effort(num_calls=1000, num_launches=1000), Effort(moved_bytes=10**9)
    assert RATES.runs_ahead
    assert RATES.seconds(calls + work) == max(RATES.seconds(calls), RATES.seconds(work))
    beside = replace(RATES, runs_ahead=False)
    assert beside.seconds(calls + work) == RATES.seconds(calls) + RATES.seconds(work)


def one_layer(dtype: str, num_rows: int, num_layers: int = 1) -> tuple[Delivery, list[Copy]]:
    """What a matrix of [num_rows, 1024] takes from one rank to another, in messages of 64 KB."""
    shape, end = (num_rows, 1024), SideRates(device="cpu", rates=publish_rates(GPUS["cpu"], "cpu"))

    def layout(buffer: str, dtype: str) -> RankLayout:
        box = Box(start=(0, 0), stop=shape, buffer=buffer, offset=0, strides=(1024, 1))
        held = {"layers.0.w": ParameterLayout(shape=shape, dtype=dtype, boxes=(box,))}
        return RankLayout(rank=0, host="here", parameters=held)

    copy = Copy(
        *("layers.0.w", (0, 0), shape, 0, "layers.0.w", 0, (1024, 1), 0, 0, (1024, 1), dtype),
        num_layers=num_layers,
        layer_step=1,
        target_layer_step=num_rows * 1024,
    )
    source, target = layout("layers.0.w", "float32"), layout(BUFFER, dtype)
    found = delivery(
        [(copy, num_layers)],
        [(source, num_layers)],
        [(target, num_layers)],
        ends=(end, end),
        transport="collective",
        message_bytes=1 << 16,
    )
    return found, [copy]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["float32", "bfloat16"]), st.integers(1, 200), st.integers(1, 9))
def test_messages_and_bytes_are_those_that_are_sent(
    dtype: str, num_rows: int, num_layers: int
) -> None:
    found, copies = one_layer(dtype, num_rows, num_layers)
    made = messages([each for copy in copies for each in copy.each()], 1 << 16)
    itemsize = getattr(torch, dtype).itemsize
    assert found.num_bytes.tolist() == [[num_layers * num_rows * 1024 * itemsize]]
    assert found.num_messages.tolist() == [[len(made)]]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["float32", "bfloat16"]), st.integers(1, 300), st.integers(1, 50))
def test_more_bytes_never_take_less_time(dtype: str, num_rows: int, more: int) -> None:
    few, many = (one_layer(dtype, rows)[0] for rows in (num_rows, num_rows + more))
    for name in ("packing_s", "unpacking_s", "verify_s", "num_messages"):
        assert (getattr(many, name) >= getattr(few, name)).all(), name


@pytest.mark.parametrize(
    ("num_bytes", "late"),
    [([[800]], 0.0), ([[800], [800]], 0.0), ([[800, 800]], 0.125), ([[40, 40], [40, 40]], 0.5)],
)
def test_the_last_target_begins_after_a_message_to_each_other(
    num_bytes: list[list[int]], late: float
) -> None:
    found = replace(one_layer("float32", 1)[0], num_bytes=np.array(num_bytes))
    assert found.late(100) == late


def test_narrower_numbers_on_the_wire_take_less_of_everything_but_calls() -> None:
    wide, narrow = one_layer("float32", 200)[0], one_layer("bfloat16", 200)[0]
    assert 2 * narrow.num_bytes == wide.num_bytes
    for name in ("unpacking_s", "verify_s", "num_messages"):
        assert np.all(getattr(narrow, name) < getattr(wide, name)), name


def stages_of(num_replicas: int, **weights: object) -> dict[str, float]:
    """Of a publish to replicas that have a host each."""
    config = make_recipe(
        trainer=TrainerConfig(num_ranks=4, device="cuda"),
        generator=EmbeddedConfig(
            num_ranks=4, num_replicas=num_replicas, dtype="bfloat16", device="cuda"
        ),
        weights=WeightsConfig(**{"transport": "collective"} | weights),
        cluster=ClusterConfig(num_hosts=16, num_gpus_per_host=4),
    )
    return forecast_publish(config, replace(LLAMA, hidden_size=512, head_dim=64)).stages_s


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 14))
def test_a_version_is_packed_once_and_sent_to_each_replica(num_replicas: int) -> None:
    one, some = stages_of(1), stages_of(num_replicas)
    assert sum(some.values()) >= sum(one.values())
    assert some["packing"] == one["packing"]
    assert some["verify"] == one["verify"]
    more = stages_of(num_replicas + 1)
    assert sum(more.values()) >= sum(some.values())


def test_staging_in_host_memory_is_reached_over_its_link() -> None:
    here, there = stages_of(2), stages_of(2, staging="host")
    for name in ("verify", "commit"):
        assert there[name] > here[name], name
    assert sum(there.values()) > sum(here.values())
    assert there["packing"] == here["packing"]


def test_mapped_memory_has_no_messages() -> None:
    placed = {"placement": make_recipe().placement}
    config = make_recipe(
        trainer=TrainerConfig(num_ranks=2, device="cuda"),
        generator=EmbeddedConfig(num_ranks=2, dtype="bfloat16", device="cuda"),
        weights=WeightsConfig(transport="cuda_ipc"),
        cluster=ClusterConfig(num_gpus_per_host=4),
        **placed,
    )
    found = forecast_publish(config, LLAMA).stages_s
    assert found["unpacking"] == 0
    assert found["packing"] > 0
