"""The command bisect: the first bad snapshot of a branch, by a program, a NaN or a metric."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from tensorstore_ck.cli.complete_names import complete_address, complete_ref
from tensorstore_ck.cli.options import StoreChoice, command, default_option, store_options
from tensorstore_ck.cli.output import emit, fields_of, green, metrics_text, printable, red, short_root, snapshot_line, step_text
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.cli.run_user_program import program_words, run_program
from tensorstore_ck.common.metric_condition import condition, names_in
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log.snapshot import Snapshot

if TYPE_CHECKING:
    from tensorstore_ck.maintenance.bisect_history import Bisection, Tested
    from tensorstore_ck.store import Store

_FREED: Final = "freed"
SKIP_EXIT: Final = 125
MAX_BAD_EXIT: Final = 127
_COLOURS: Final[dict[str, Callable[[str], str]]] = {"good": green, "bad": red, "skip": str}
_Test = Callable[[Snapshot], tuple[bool | None, str]]
"""Whether a snapshot is bad, and why."""


@command(
    "Find the first bad snapshot of a branch.",
    "tsck bisect runs/gpt --nan",
    "tsck bisect runs/gpt --metric 'loss > 5 or loss is nan'",
    "tsck bisect runs/gpt --exec 'python eval.py --root {root}' --good runs/gpt@1000",
)
@click.argument("ref", shell_complete=complete_ref)
@click.option("--exec", "program", metavar="CMD", help="Test by a program: exit 0 good, 125 cannot be tested, other codes to 127 bad.")
@click.option("--nan", is_flag=True, help="Bad: a tensor has a NaN or an infinity. Reads the tensors, up to the first such one.")
@click.option("--metric", "text", metavar="CONDITION", help="Bad: a condition on the metrics holds. Reads no tensors.")
@click.option("--include", metavar="GLOB", multiple=True, help="With --nan: only tensors with such names (repeatable).")
@click.option("--good", metavar="ADDRESS", shell_complete=complete_address, help="A good snapshot before the bad one. Default: the oldest.")
@click.option("--bad", metavar="ADDRESS", shell_complete=complete_address, help="A bad snapshot. Default: the newest.")
@default_option("--pin-for", "pin_for", "1d", "How long one test may take.")
@click.option("--unpinned-unsafe", is_flag=True, help="Pin nothing: for a store that cannot be written to.")
@store_options(writes=True)
def bisect(
    ref: str,
    choice: StoreChoice,
    *,
    program: str | None,
    nan: bool,
    text: str | None,
    include: tuple[str, ...],
    good: str | None,
    bad: str | None,
    pin_for: float,
    unpinned_unsafe: bool,
    as_json: bool,
) -> None:
    """Find the first bad snapshot of branch REF by a binary search, as git bisect does, with --exec, --nan or --metric as the test.

    The search tests both ends first. It is right only if all snapshots after the first bad one are bad, too: else it finds one of the
    places where a bad one follows a good one. Snapshots that training was taken back from are left out.

    CMD runs without a shell, with {root}, {step}, {ref} and {store} filled in, which TSCK_ROOT, TSCK_STEP, TSCK_REF and TSCK_STORE hold,
    too. An exit code above 127 ends the search. In a CONDITION, NaN satisfies no comparison: add `or loss is nan`. Snapshots that cannot
    be tested, that lack a metric, or that were freed are skipped: the answer may then be a range.

    Snapshots that may still be the answer are pinned until the search ends (--metric needs no pins).
    """
    if [program is not None, nan, text is not None].count(True) != 1:
        raise click.UsageError("Give one of --exec, --nan and --metric.")
    if include and not nan:
        raise click.UsageError("--include is for --nan.")
    pins = not unpinned_unsafe and text is None
    outcomes = list[dict[str, object]]()
    why = _FREED

    def is_bad(snapshot: Snapshot) -> bool | None:
        nonlocal why
        verdict, why = test(snapshot)
        return verdict

    def tested(result: "Tested") -> None:
        nonlocal why
        outcomes.append({**result._asdict(), "why": why})
        if not as_json:
            bar.say(_test_line(result, why))
        why = _FREED

    with Bar() as bar, choice.open(bar if nan else None, read_only=not pins) as store:
        if program is not None:
            test = _program_test(program, choice.require_url(), quiet=as_json)
        else:
            test = _metric_test(text) if text is not None else _nan_test(store, include or None, bar)
        bisection = store.bisect(ref, is_bad, good=good, bad=bad, pin_for=pin_for, unpinned_unsafe=not pins, tested=tested)
    next_command = choice.complete(f"`tsck diff {short_root(bisection.last_good.root)} {short_root(bisection.first_bad.root)} --stats`")
    document = {**fields_of(bisection), "tested": outcomes, "next": next_command.strip("`")}
    emit(document, [*_answer_lines(bisection), f"{next_command} shows what changed"], as_json=as_json)


def _program_test(program: str, url: str, *, quiet: bool) -> _Test:
    words = program_words(program)

    def test(snapshot: Snapshot) -> tuple[bool | None, str]:
        try:
            code = run_program(words, snapshot, url, quiet=quiet)
        except OSError as exc:
            raise InvalidOptionError(f"--exec {words[0]} could not be run: {exc}", object_id="exec") from exc
        if not 0 <= code <= MAX_BAD_EXIT:
            raise InvalidOptionError(
                f"--exec {words[0]} ended with {code} for step {step_text(snapshot.step)}, which ends the search (0: good, {SKIP_EXIT}: "
                f"cannot be tested, others to {MAX_BAD_EXIT}: bad)",
                object_id="exec",
            )
        return (None if code == SKIP_EXIT else code != 0), f"exit code {code}"

    return test


def _metric_test(text: str) -> _Test:
    holds, names = condition(text), sorted(names_in(text))

    def test(snapshot: Snapshot) -> tuple[bool | None, str]:
        numbers = dict(snapshot.metrics) if snapshot.step is None else {**snapshot.metrics, "step": snapshot.step}
        missing = [name for name in names if name not in numbers]
        if missing:
            return None, f"no {', '.join(missing)}"
        return holds(numbers), metrics_text({name: numbers[name] for name in names})

    return test


def _nan_test(store: "Store", include: tuple[str, ...] | None, bar: Bar) -> _Test:
    def test(snapshot: Snapshot) -> tuple[bool | None, str]:
        bar.phase(f"step {step_text(snapshot.step)} {short_root(snapshot.root)}", 0, snapshot.logical_bytes)
        name = store.find_nan(snapshot.root, include)
        return name is not None, "" if name is None else f"in {name}"

    return test


def _test_line(result: "Tested", why: str) -> str:
    line = snapshot_line(_COLOURS[result.verdict](result.verdict.ljust(4)), result.snapshot)
    return f"{line}  {printable(why)}" if why else line


def _answer_lines(bisection: "Bisection") -> list[str]:
    lines = ["", snapshot_line("last good:", bisection.last_good)]
    if bisection.skipped:
        steps = ", ".join(f"{short_root(snapshot.root)}" for snapshot in bisection.skipped[:5])
        more = f" and {len(bisection.skipped) - 5:,} more" if len(bisection.skipped) > 5 else ""
        lines.append(f"not tested: {steps}{more}: the first bad snapshot is one of these, or")
    return [*lines, red(snapshot_line("first bad:", bisection.first_bad))]
