"""Who keeps whose files, and what counts as a host."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.errors import MissingObjectError
from tensorstore_ck.session.peers import host_of_folder, sources_of, targets_of
from tensorstore_ck.session.peers.copy_holders import block_of
from tests.effort import effort

FEW = settings(max_examples=effort(40, 200))
HOSTS = st.lists(st.integers(0, 5), min_size=1, max_size=20).map(lambda numbers: [bytes([number]) for number in numbers])


@given(hosts=HOSTS, copies=st.integers(1, 6))
@FEW
def test_copies_lie_on_as_many_other_hosts_as_there_can_be(hosts: list[bytes], copies: int) -> None:
    for rank, host in enumerate(hosts):
        kept_on = [hosts[target] for target in targets_of(rank, hosts, copies)]
        assert host not in kept_on
        assert len(set(kept_on)) == len(kept_on) == min(copies, len(set(hosts)) - 1)


@given(hosts=HOSTS, copies=st.integers(1, 6))
@FEW
def test_sources_are_those_whose_target_a_rank_is_in_the_order_of_rounds(hosts: list[bytes], copies: int) -> None:
    rounds = [targets_of(rank, hosts, copies) for rank in range(len(hosts))]
    for rank in range(len(hosts)):
        expected = [(step, source) for source, targets in enumerate(rounds) for step, target in enumerate(targets) if target == rank]
        assert sources_of(rank, hosts, copies) == [source for _, source in sorted(expected)]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_load_is_even(copies: int) -> None:
    hosts = [bytes([rank // 8]) for rank in range(64)]
    assert set(Counter(target for rank in range(64) for target in targets_of(rank, hosts, copies)).values()) == {copies}


@given(hosts=HOSTS, copies=st.integers(1, 6))
@FEW
def test_ranks_have_to_do_with_those_of_their_block_alone_and_blocks_are_small(hosts: list[bytes], copies: int) -> None:
    for rank in range(len(hosts)):
        block = block_of(rank, hosts, copies)
        assert {rank, *targets_of(rank, hosts, copies), *sources_of(rank, hosts, copies)} <= set(block)
        assert all(block_of(other, hosts, copies) == block for other in block)
        assert min(copies + 1, len(set(hosts))) <= len({hosts[other] for other in block}) <= 2 * copies + 1


def test_hosts_are_next_ones_in_a_ring_and_ranks_those_at_the_same_position() -> None:
    hosts = [b"a", b"a", b"b", b"b", b"c", b"c"]
    assert [targets_of(rank, hosts, 1) for rank in range(6)] == [[2], [3], [4], [5], [0], [1]]
    assert targets_of(5, hosts, 2) == [1, 3]


def test_a_host_is_who_shares_the_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert host_of_folder(tmp_path / "one") == host_of_folder(str(tmp_path / "link")) != host_of_folder(tmp_path / "two")
    with pytest.raises(MissingObjectError, match="three"):
        host_of_folder(tmp_path / "three")
