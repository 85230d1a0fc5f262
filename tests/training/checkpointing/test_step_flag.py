"""The board after the connection to the group's store broke."""

from tensorstore_ck.session.group.group import StoreThread
from tensorstore_ck.training.checkpointing.step_flag import StepFlag
from tests.session.group.simulation import FakeStore


class Server:
    """Of which each clone is a connection."""

    def __init__(self) -> None:
        self.there = FakeStore()
        self.connections: list[Connection] = []

    def clone(self) -> "Connection":
        self.connections.append(Connection(self.there))
        return self.connections[-1]


class Connection(FakeStore):
    def __init__(self, there: FakeStore) -> None:
        super().__init__()
        self.values = there.values
        self.is_broken = False

    def _count(self, *values: bytes) -> None:
        if self.is_broken:
            raise RuntimeError("connection reset")


def test_a_connection_that_broke_is_made_again() -> None:
    server = Server()
    thread = StoreThread(server)
    board = StepFlag(thread, thread.renew, rank=0, prefix="", lead_steps=3, clock=lambda: 0.0)
    assert board.poll("save", 1, wants=False) is None
    server.connections[0].is_broken = True
    assert board.poll("save", 2, wants=True) == 5
    assert (len(server.connections), board.away_seconds) == (2, 0.0)
    thread.close()
