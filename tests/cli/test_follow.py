"""`tsck follow` at its start, and while the store does not answer."""

from collections.abc import Callable

import pytest

from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.integrations.exporting import FollowedFolder
from tests.cli.conftest import Tsck

FOLLOW = ("follow", "runs/gpt", "--to", "served")


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bool]], None]:
    """Sets whether the store answers the next updates; afterwards it does."""
    update = FollowedFolder.update

    def set_answers(answers: list[bool]) -> None:
        def updated(folder: FollowedFolder) -> object:
            if answers and not answers.pop(0):
                raise BackendUnavailableError("no route to the store")
            return update(folder)

        monkeypatch.setattr(FollowedFolder, "update", updated)

    return set_answers


def test_a_folder_that_is_up_to_date_counts_as_its_first_version(history: Tsck) -> None:
    for _ in range(2):
        done = history(*FOLLOW, "--count", "1")
        assert done.code == 0
        assert "served is now" in done.out


def test_a_store_that_does_not_answer_at_the_start_is_an_error(history: Tsck, answering: Callable[[list[bool]], None]) -> None:
    answering([False])
    assert history(*FOLLOW).code == BackendUnavailableError.exit_code


def test_it_warns_once_while_the_store_does_not_answer(
    history: Tsck, answering: Callable[[list[bool]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering([True, False, False])
    slept: list[float] = []

    def save_at_the_third(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            assert history("reset", "runs/gpt", "runs/gpt~1").code == 0

    monkeypatch.setattr("tensorstore_ck.cli.cmd_watch_follow.time.sleep", save_at_the_third)
    done = history(*FOLLOW, "--count", "2", "--poll", "5s")
    assert done.code == 0
    assert done.err.count("stays as it is until the store answers: no route to the store") == 1
    assert done.out.count("served is now") == 2
    assert slept == [5, 5, 5], "also after a version: an engine loads it"
