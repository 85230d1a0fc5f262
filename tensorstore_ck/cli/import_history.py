"""`tsck import --history`: several checkpoints, one snapshot each; and the hint to use it."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorstore_ck.cli.options import STORE_VARIABLE, StoreChoice
from tensorstore_ck.cli.output import counted, emit, metrics_text, printable, put_sizes, snapshot_line, table
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.format.codec import CodecName

if TYPE_CHECKING:
    from tensorstore_ck.integrations.importing import ImportedStep, PlannedImport


@dataclass(frozen=True, slots=True)
class AskedHistory:
    """The arguments of `importing.import_history`."""

    paths: Sequence[str]
    ref: str
    step_from: str
    metrics: Mapping[str, float | str]
    metadata: Mapping[str, object]
    exclude: Sequence[str]


def run(asked: AskedHistory, choice: StoreChoice, codec: CodecName, *, dry_run: bool, as_json: bool) -> None:
    """Imports the checkpoints, and prints the outcome of each at once."""
    from tensorstore_ck.integrations.importing import import_history, inspect_history  # noqa: PLC0415 - loads torch

    if dry_run:
        plan = inspect_history(asked.paths, step_from=asked.step_from, metrics=asked.metrics, exclude=asked.exclude)
        document = {"plan": plan, "steps": []}
        emit(document, [*_plan_lines(plan), f"{counted(len(plan), 'snapshot')}; nothing was written (--dry-run)"], as_json=as_json)
        return
    sizes: dict[str, int] = {}
    with Bar("importing") as bar, choice.open(bar, codec) as store:
        numbers = iter(range(1, 1 << 62))

        def planned(plan: "Sequence[PlannedImport]") -> None:
            sizes.update((each.path, each.contents.tensor_bytes) for each in plan)
            bar.expect(sum(sizes.values()))

        def imported(step: "ImportedStep") -> None:
            number = next(numbers)
            bar(sum(list(sizes.values())[:number]), sum(sizes.values()))
            if not as_json:
                bar.say(f"{number}/{len(sizes)} {_step_line(step)}")

        steps = import_history(
            store,
            asked.paths,
            ref=asked.ref,
            step_from=asked.step_from,
            metrics=asked.metrics,
            metadata=asked.metadata,
            exclude=asked.exclude,
            planned=planned,
            imported=imported,
        )
    found = sum(step.was_there for step in steps)
    were = f", {counted(found, 'snapshot')} {'was' if found == 1 else 'were'} there already" if found else ""
    done = f": {counted(len(steps) - found, 'snapshot')} imported{were}"
    emit({"plan": [], "steps": steps}, [snapshot_line(f"{printable(asked.ref)} has", steps[-1].snapshot) + done], as_json=as_json)


@contextmanager
def hinting(choice: StoreChoice, path: str, ref: str, exclude: Sequence[str]) -> Iterator[None]:
    """Adds the command that imports a folder to the error that refuses it because it holds several steps."""
    from tensorstore_ck.integrations.importing import SeveralStepsError  # noqa: PLC0415 - loads torch

    try:
        yield
    except SeveralStepsError as exc:
        store = ["-s", choice.url] if choice.url and choice.url != os.environ.get(STORE_VARIABLE) else []
        left_out = [word for glob in exclude for word in ("--exclude", glob)]
        words = ["tsck", "import", "--history", *exc.paths(path), "--step-from", exc.step_from, "--ref", ref, *left_out, *store]
        exc.args = (exc.message(shlex.join(words)),)
        raise


def _plan_lines(plan: "Sequence[PlannedImport]") -> list[str]:
    rows = [
        [str(each.step), printable(os.path.basename(each.path)), human_bytes(each.contents.tensor_bytes), metrics_text(each.metrics)]
        for each in plan
    ]
    return table(["STEP", "FILE", "SIZE", "METRICS"], rows, right={"STEP", "SIZE"})


def _step_line(step: "ImportedStep") -> str:
    name = printable(os.path.basename(step.path))
    return snapshot_line(f"{name} {'is there already:' if step.was_there else 'is now'}", step.snapshot) + (
        "" if step.was_there else put_sizes(step.snapshot)
    )
