"""A restore says which learning rates and other options of this script it replaced by those of the snapshot."""

import pytest
import torch

import tensorstore_ck as tsck


def training(lr: float, *, weight_decay: float = 0.01, scheduled: bool = False) -> tuple[tsck.TrainingState, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if scheduled else None
    state = tsck.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in range(3 if scheduler else 0):
        optimizer.step()
        assert scheduler
        scheduler.step()
    return state, optimizer


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "replace those" in record.message]


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_restore_names_the_options_that_it_replaced(store: tsck.Store, caplog: pytest.LogCaptureFixture, scheduled: bool) -> None:
    training(0.001, scheduled=scheduled)[0].put(store, ref="run")
    forked, optimizer = training(0.01, weight_decay=0.5, scheduled=scheduled)
    forked.restore(store, "run")
    assert optimizer.param_groups[0]["lr"] == (0.001 / 4 if scheduled else 0.001)
    (line,) = said(caplog)
    assert "optimizer.lr is 0.001, not 0.01, optimizer.weight_decay is 0.01, not 0.5; to use your own, set them after" in line


def test_a_restore_of_the_same_run_says_nothing_of_what_its_schedule_changes(store: tsck.Store, caplog: pytest.LogCaptureFixture) -> None:
    training(0.001, scheduled=True)[0].put(store, ref="run")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    tsck.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler).restore(store, "run")
    assert scheduler.last_epoch == 3
    assert not said(caplog)
