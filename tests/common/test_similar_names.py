"""Which known names a user may have meant."""

import pytest

from tensorstore_ck.common.similar_names import similar_names
from tests.effort import PATIENCE_SECONDS


def test_close_names_come_first_however_many_there_are() -> None:
    others = [f"{number:07}" for number in range(10_000)]
    assert similar_names("val_los", [*others[:500], "val_loss", "val_lost", *others[500:]], 1) in (["val_loss"], ["val_lost"])
    assert similar_names("val_los", ["step", "time"]) == []
    assert similar_names("x" * 200, ["x" * 199 + "y"]) == ["x" * 199 + "y"]


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_many_long_names_take_no_longer() -> None:
    """difflib alone takes an hour for these."""
    names = [f"{number:06}" + "vallosaet_" * 25 for number in range(50_000)]
    assert similar_names("vallosaet_" * 25, names)
