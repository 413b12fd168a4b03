"""Which source feeds which replica, and who succeeds the head of a host."""

import random

import pytest

from llamarl.weights.layout.boxes import RankLayout
from llamarl.weights.sync.assignment import Assignment


def ranks(*hosts):
    return [
        RankLayout(rank=rank, host=host, parameters={}, buckets=())
        for rank, host in enumerate(hosts)
    ]


def joined(*hosts):
    assignment = Assignment()
    for replica, names in enumerate(hosts):
        assignment.join(replica, ranks(*names))
    return assignment


def test_the_trainer_feeds_the_first_replica_of_each_host_and_that_one_the_others() -> None:
    assignment = joined("a", "b", "a", "bb", "a")
    assert [assignment.source_of(replica) for replica in range(5)] == [None, None, 0, 1, 0]


def test_the_trainer_feeds_every_replica_over_several_hosts() -> None:
    assignment = joined("ab", "ab", "a", "ba")
    assert [assignment.source_of(replica) for replica in range(4)] == [None] * 4


def test_the_next_replica_of_the_host_succeeds_a_head_that_leaves() -> None:
    assignment = joined("a", "a", "b", "a")
    assignment.leave(0)
    assert [assignment.source_of(replica) for replica in (1, 2, 3)] == [None, None, 1]
    assignment.join(0, ranks("a"))
    assert assignment.source_of(0) == 1, "it comes back as the last one of its host"
    assignment.leave(3)
    assert [assignment.source_of(replica) for replica in (0, 1)] == [1, None]


def test_a_replica_that_has_not_joined_can_leave_and_has_no_source() -> None:
    assignment = joined("a")
    assignment.leave(7)
    with pytest.raises(KeyError):
        assignment.source_of(7)


def test_every_host_has_one_head_whichever_replica_joins_or_leaves() -> None:
    rng, assignment, hosts = random.Random(0), Assignment(), {}
    for _ in range(500):
        replica = rng.randrange(12)
        if replica in hosts:
            assignment.leave(replica)
            del hosts[replica]
        else:
            hosts[replica] = rng.choice("abc")
            assignment.join(replica, ranks(hosts[replica]))
        heads = [each for each in hosts if assignment.source_of(each) is None]
        assert sorted(hosts[head] for head in heads) == sorted(set(hosts.values()))
        for each in hosts.keys() - set(heads):
            source = assignment.source_of(each)
            assert source in heads
            assert hosts[source] == hosts[each]
