"""Queue and slot choice under arbitrary orders of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generation.scheduler import PrefixIndex, Queue, QueuedRequest, assign_slots
from llamarl.types import Purpose, Request, Sampling

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


@settings(max_examples=200, deadline=None)
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
            assert queue.has_startable(first) == bool(ready)
            assert queue.take(first, second) == ready[:second]
            model = [w for w in model if w not in ready[:second]]
        else:
            gone = {first, second}
            removed = [w.request.row_id for w in queue.abort(gone)]
            assert removed == [w.request.row_id for w in model if w.request.row_id in gone]
            model = [w for w in model if w.request.row_id not in gone]
        assert len(queue) == len(model)


@settings(max_examples=200, deadline=None)
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
