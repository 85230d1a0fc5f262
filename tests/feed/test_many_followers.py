"""What followers ask of a store: each the same for a version, however many there are, and nothing that the trainer pays for."""

from benches.feed import requests_of


def test_requests_do_not_grow_with_the_number_of_followers() -> None:
    trainer, (alone,) = requests_of(1)
    trainer_of_many, each = requests_of(12)
    assert trainer_of_many == trainer
    assert set(each) == {alone}
    assert alone == 5, "two for the log, one each for the record, the part and the differences"
