"""Which source feeds which replica, and who succeeds the head of a host or a site."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llamarl.publish.layout import RankLayout
from llamarl.publish.reshard import WeightKind, assign_sources


def sources(hosts, far_sites=None):
    """Of replicas, each with a rank on each of its hosts, in the order they joined."""
    return assign_sources(
        {
            replica: [
                RankLayout(rank=rank, host=host, parameters={}) for rank, host in enumerate(names)
            ]
            for replica, names in hosts.items()
        },
        far_sites or {},
    )


def test_the_trainer_feeds_the_first_replica_of_each_host_and_that_one_the_others() -> None:
    found = sources(dict(enumerate(("a", "b", "a", "bb", "a"))))
    assert found == {0: None, 1: None, 2: 0, 3: 1, 4: 0}


def test_the_trainer_feeds_every_replica_over_several_hosts() -> None:
    assert set(sources(dict(enumerate(("ab", "ab", "a", "ba")))).values()) == {None}


def test_the_next_replica_of_the_host_succeeds_a_head_that_leaves() -> None:
    assert sources({1: "a", 2: "b", 3: "a"}) == {1: None, 2: None, 3: 1}
    assert sources({1: "a", 3: "a", 0: "a"})[0] == 1, "it comes back as the last one of its host"


def test_every_host_has_one_head_whichever_replica_joins_or_leaves() -> None:
    rng, hosts = random.Random(0), {}
    for _ in range(500):
        replica = rng.randrange(12)
        if hosts.pop(replica, None) is None:
            hosts[replica] = rng.choice("abc")
        found = sources(hosts)
        heads = [each for each in hosts if found[each] is None]
        assert sorted(hosts[head] for head in heads) == sorted(set(hosts.values()))
        for each in hosts.keys() - set(heads):
            assert found[each] in heads
            assert hosts[found[each]] == hosts[each]


def test_a_replica_feeds_only_replicas_of_its_own_kind() -> None:
    layouts = {i: [RankLayout(rank=0, host="a", parameters={})] for i in range(5)}
    kinds = [WeightKind(device="cpu", form=(dtype,)) for dtype in ("float32", "bfloat16")]
    found = assign_sources(layouts, {}, lambda replica: kinds[replica % 2])
    assert found == {0: None, 1: None, 2: 0, 3: 1, 4: 0}
    far = assign_sources(layouts, {"a": "south"}, lambda replica: kinds[replica % 2])
    assert far == found, "each kind crosses the link once"


FAR = {"c": "south", "d": "south", "e": "east", "f": "east"}
PLACES = st.sampled_from(["a", "b", "ab", "c", "d", "cd", "e", "f", "ef"])


def test_the_trainer_feeds_one_replica_of_another_site_and_that_one_the_hosts_there() -> None:
    hosts = {0: "a", 3: "c", 1: "d", 2: "b", 5: "d", 4: "c"}
    assert sources(hosts, FAR) == {0: None, 2: None, 3: None, 1: 3, 4: 3, 5: 1}
    del hosts[3]
    assert sources(hosts, FAR) == {0: None, 2: None, 1: None, 4: 1, 5: 1}, "the next one succeeds"


@given(st.permutations(range(12)), st.lists(PLACES, max_size=12))
def test_a_version_crosses_each_slow_link_once_and_reaches_every_replica(order, places) -> None:
    hosts = dict(zip(order, places, strict=False))
    found = sources(hosts, FAR)
    assert list(found) == list(hosts)
    crossed = Counter()
    for replica, source in found.items():
        here = FAR.get(hosts[replica][0])
        if here != (None if source is None else FAR.get(hosts[source][0])):
            assert source is None, "the trainer alone sends to another site"
            crossed[here] += 1
        on_the_way = []
        while source is not None:  # to the trainer, and not in a circle
            on_the_way.append(source)
            assert len(on_the_way) <= 3
            source = found[source]
    assert crossed == {FAR[names[0]]: 1 for names in hosts.values() if names[0] in FAR}
