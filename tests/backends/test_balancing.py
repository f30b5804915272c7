"""Which member of a pool gets a request (`backends/balancing.py`)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batchline.backends.balancing import AFFINITY_SLACK, MAX_PREFIXES, Balancer, Member


def pool(*limits: int) -> tuple[Balancer[Member], list[Member]]:
    members = [Member(f"m{number}", limit=limit) for number, limit in enumerate(limits)]
    return Balancer(list(members)), members


def taken(balancer: Balancer[Member], count: int, prefix: object = None) -> list[str]:
    """The names of the members that get so many requests, all of which stay in flight."""
    names = []
    for _ in range(count):
        member = balancer.choose(0.0, prefix)
        assert member is not None
        balancer.take(member)
        names.append(member.name)
    return names


def test_members_get_requests_in_proportion_to_their_limits() -> None:
    balancer, _ = pool(10, 30)
    assert Counter(taken(balancer, 20)) == {"m0": 5, "m1": 15}


def test_no_member_gets_more_than_its_limit() -> None:
    balancer, members = pool(2, 1)
    assert Counter(taken(balancer, 3)) == {"m0": 2, "m1": 1}
    assert balancer.choose(0.0) is None
    balancer.give_back(members[1])
    assert balancer.choose(0.0) is members[1]


def test_a_lowered_limit_gets_nothing_until_enough_requests_have_ended() -> None:
    balancer, (member,) = pool(4)
    taken(balancer, 4)
    member.limit = 2
    for left in (3, 2):
        balancer.give_back(member)
        assert (member.num_in_flight, balancer.choose(0.0)) == (left, None)
    balancer.give_back(member)
    assert balancer.choose(0.0) is member


def test_requests_with_one_prefix_stay_together_until_their_member_has_clearly_more_load() -> None:
    balancer, _ = pool(100, 100)
    num_together = int(AFFINITY_SLACK * 100) + 1
    assert taken(balancer, num_together, "system prompt") == ["m0"] * num_together
    assert taken(balancer, 1, "system prompt") == ["m1"], "the other member is idle"


def test_prefixes_are_spread_over_the_members() -> None:
    balancer, _ = pool(100, 100)
    first, second = taken(balancer, 1, "a"), taken(balancer, 1, "b")
    assert first != second
    assert taken(balancer, 3, "a") == first * 3
    assert taken(balancer, 3, "b") == second * 3


def test_a_full_member_loses_its_prefix_to_another_one() -> None:
    balancer, (_, other) = pool(1, 1)
    taken(balancer, 1, "a")
    assert balancer.choose(0.0, "a") is other


def test_dead_and_resting_members_get_nothing() -> None:
    balancer, (dead, resting, healthy) = pool(5, 5, 5)
    dead.is_dead = True
    resting.resting_until = 10.0
    assert {balancer.choose(9.9), balancer.choose(9.9, "a")} == {healthy}
    healthy.is_dead = True
    assert balancer.choose(9.9, "a") is None
    assert balancer.choose(10.0, "a") is resting
    assert balancer.next_end_of_rest(9.9) == 10.0
    assert balancer.next_end_of_rest(10.0) is None
    assert balancer.has_living()
    resting.is_dead = True
    assert not balancer.has_living()
    assert balancer.next_end_of_rest(9.9) is None, "its rest is not what keeps it from work"


def test_a_member_that_failed_with_a_request_gets_it_again_only_if_the_others_are_dead() -> None:
    balancer, (failed, other) = pool(5, 1)
    assert balancer.choose(0.0, "a", avoid={failed}) is other
    balancer.take(other)
    assert balancer.choose(0.0, "a", avoid={failed}) is None, "the other member is full, and will have room"
    other.is_dead = True
    assert balancer.choose(0.0, "a", avoid={failed}) is failed


def test_only_members_that_can_answer_a_request_get_it() -> None:
    balancer, (first, second) = pool(5, 5)
    assert balancer.choose(0.0, "a", among=[second]) is second
    assert balancer.choose(0.0, "a", among=[first]) is first
    assert balancer.choose(0.0, among=[]) is None


def test_members_can_come_and_go_while_requests_run() -> None:
    balancer, (first,) = pool(1)
    taken(balancer, 1, "a")
    later = Member("later", limit=1)
    balancer.add(later)
    assert balancer.choose(0.0, "a") is later
    balancer.remove(later)
    assert balancer.choose(0.0, "a") is None
    balancer.give_back(first)
    assert balancer.choose(0.0, "a") is first


def test_a_bounded_number_of_prefixes_is_remembered() -> None:
    balancer, _ = pool(1, 1)
    for prefix in range(MAX_PREFIXES + 100):
        balancer.choose(0.0, prefix)
    assert len(balancer._homes) == MAX_PREFIXES


@given(
    limits=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60),
)
def test_a_free_place_is_never_left_empty(limits: list[int], actions: list[tuple[bool, int]]) -> None:
    balancer, members = pool(*limits)
    in_flight: list[Member] = []
    for begins, number in actions:
        if begins:
            member = balancer.choose(0.0, number)
            assert (member is None) == all(one.num_in_flight == one.limit for one in members)
            if member is not None:
                balancer.take(member)
                in_flight.append(member)
        elif in_flight:
            balancer.give_back(in_flight.pop(number % len(in_flight)))
    assert sum(one.num_in_flight for one in members) == len(in_flight)
    assert all(0 <= one.num_in_flight <= one.limit for one in members)
