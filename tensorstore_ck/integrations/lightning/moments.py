"""What the user's trigger learns of the moment of a step, and what happens before the save that it causes."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from tensorstore_ck.training.checkpointing import Trigger
from tensorstore_ck.training.checkpointing.triggers import DecidedTrigger, TriggerContext


class FilesNamedFirst(Trigger):
    """The user's trigger: ModelCheckpoint names files and notes the best before a save, since its notes are saved with the rest."""

    def __init__(self, when: Trigger, asked: list[str], name_files: Callable[[], None]) -> None:
        """`asked`: files for which ModelCheckpoint wants a save in any case."""
        self._when, self._asked, self._name_files = when, asked, name_files
        self._fired = False

    def fires(self, moment: TriggerContext) -> bool:
        """See `Trigger`."""
        self._fired = self._when.fires(moment)
        if self._fired and not self._asked:
            self._name_files()
        return self._fired or bool(self._asked)

    def causes(self) -> Iterator[str]:
        """See `Trigger`."""
        return self._when.causes() if self._fired else iter(())

    def saved(self, moment: TriggerContext) -> None:
        """See `Trigger`."""
        self._when.saved(moment)

    def decided(self) -> Iterator[DecidedTrigger]:
        """See `Trigger`."""
        return self._when.decided()


def newest_metrics(trainer: Any) -> dict[str, float]:
    """The newest value of each metric that is one number."""
    found = {name: value for name, value in trainer.callback_metrics.items() if isinstance(value, Tensor) and value.numel() == 1}
    return {name: float(value) for name, value in found.items()}


def epoch_of(trainer: Any) -> float:
    """The number of epochs that have ended, with the part of the present one."""
    progress, batches = trainer.fit_loop.epoch_progress.current, trainer.num_training_batches
    is_within = progress.ready > progress.processed and batches not in (0, float("inf"))
    share = trainer.fit_loop.epoch_loop.batch_progress.current.ready / batches if is_within else 0.0
    return float(progress.processed) + min(share, 1.0)
