"""Which source feeds which replica, and who succeeds the head of a host."""

import random

from llamarl.weights.layout.boxes import RankLayout
from llamarl.weights.sync.assignment import assign_sources


def sources(hosts):
    """Of replicas, each with a rank on each of its hosts, in the order they joined."""
    return assign_sources(
        {
            replica: [
                RankLayout(rank=rank, host=host, parameters={}, buckets=())
                for rank, host in enumerate(names)
            ]
            for replica, names in hosts.items()
        }
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
