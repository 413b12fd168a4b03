"""Queue and slot choice under arbitrary orders of events."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.records import Purpose, Request, Sampling
from llamarl.generator.engine.scheduler import PrefixIndex, Queue, QueuedRequest, assign_slots
from llamarl.generator.vllm.engine import priority

SAMPLING = Sampling(max_tokens=4)


PURPOSES = (Purpose.CHECK, Purpose.EVALUATE, Purpose.TRAIN)  # in starting order


def waiting(row_id: int, min_version: int, purpose: Purpose, prompt: int = 0) -> QueuedRequest:
    return QueuedRequest(
        request=Request(
            row_id=row_id,
            prompt_ids=(prompt,),
            sampling=SAMPLING,
            seed=0,
            min_version=min_version,
            purpose=purpose,
        )
    )


EVENT = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4), st.sampled_from(PURPOSES)),
    st.tuples(st.just("take"), st.integers(0, 4), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.integers(0, 30), st.integers(0, 30)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENT, max_size=60))
def test_the_queue_equals_a_plain_list(events: list[tuple]) -> None:
    queue, model = Queue(), []
    for row_id, (kind, first, second) in enumerate(events):
        if kind == "add":
            item = waiting(row_id, first, second)
            queue.add(item)
            model.append(item)
        elif kind == "take":
            ready = [w for w in model if w.request.min_version <= first]
            ready.sort(key=lambda w: PURPOSES.index(w.request.purpose))
            assert queue.num_startable(first) == len(ready)
            assert queue.take(first, second) == ready[:second]
            model = [w for w in model if w not in ready[:second]]
        else:
            gone = {first, second}
            removed = [w.request.row_id for w in queue.abort(gone)]
            assert removed == [w.request.row_id for w in model if w.request.row_id in gone]
            model = [w for w in model if w.request.row_id not in gone]
        assert len(queue) == len(model)


SKEWED = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(0, 2), st.sampled_from((0, 1, 7, 2**24)), st.integers(0, 3)
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(SKEWED, st.integers(0, 2), st.integers(1, 5))
def test_no_rollout_starts_before_one_of_an_earlier_step_or_a_longer_one_of_its_own(
    rollouts: list[tuple[int, int, int, int]], version: int, num_taken: int
) -> None:
    queue = Queue()
    waiting_requests = []
    for row_id, (step, min_version, tokens, purpose) in enumerate(rollouts):
        item = waiting(row_id, min_version, (*PURPOSES, Purpose.TRAIN)[purpose])
        request = replace(item.request, step=step, precedence=tokens)
        queue.add(QueuedRequest(request=request))
        waiting_requests.append(request)
    ready = [each for each in waiting_requests if each.min_version <= version]
    ready.sort(key=lambda r: (PURPOSES.index(r.purpose), r.step, -r.precedence, r.row_id))
    started = []
    while some := queue.take(version, num_taken):
        started += [each.request for each in some]
    assert started == ready
    priorities = [priority(each) for each in ready]
    assert priorities == sorted(priorities)
    assert all(0 <= abs(each) < 2**62 for each in priorities)


def test_vllm_gets_equal_priorities_only_for_equal_urgency() -> None:
    request = waiting(0, 0, Purpose.TRAIN).request
    steps = [replace(request, step=step, precedence=n) for step in (0, 9**10) for n in (0, 5)]
    changed = [*steps, replace(request, purpose=Purpose.CHECK)]
    assert len({priority(each) for each in changed}) == len(changed)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 5)), st.booleans()), max_size=30),
)
def test_a_shared_prefix_is_always_the_prompt_under_the_present_version(
    num_slots: int, rounds: list[tuple[int, set[int], bool]]
) -> None:
    """`cache` is what the slots really hold: (prompt, version), changed as the engine would."""
    prefixes, version = PrefixIndex(), 0
    cache: dict[int, tuple[int, int]] = {}
    busy: set[int] = set()
    row_id = 0
    for prompt, done, commits in rounds:
        busy -= done
        version += commits
        free = set(range(num_slots)) - busy
        starting = [
            waiting(row_id + i, 0, Purpose.TRAIN, (prompt + i) % 3) for i in range(len(free))
        ]
        row_id += len(starting)
        placements = assign_slots(starting, set(free), prefixes, version)
        slots = [p.slot for p in placements]
        assert sorted(slots) == sorted(free)
        for p in placements:
            if p.source is None:
                cache[p.slot] = (p.waiting.request.prompt_ids[0], version)
        for p in placements:
            if p.source is not None:
                assert cache[p.source] == (p.waiting.request.prompt_ids[0], version)
                cache[p.slot] = cache[p.source]
        # One prompt is computed at most once per round.
        computed = [p.waiting.request.prompt_ids for p in placements if p.source is None]
        assert len(computed) == len(set(computed))
        busy |= set(slots)
