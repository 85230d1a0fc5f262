"""Ctrl-C at any line of the package, then another save and a restore: nothing hangs, no error is wrong, nothing is lost."""

import ast
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, Final

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.waiting import Changes
from tensorstore_ck.session.save.queued_save import Worker
from tests.effort import PATIENCE_SECONDS, effort
from tests.end_to_end.interrupting import PACKAGE, interrupted

TRIALS: Final = 40
"""Of each call, outside of the soak."""
STAGED_STRIDE: Final = 7
"""In the soak: a staged save takes most of a second. A prime, so that the lines of loops take turns."""

# A call in C that Ctrl-C ended may have opened something, which is closed when it is collected.
leaves_open_files = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


class Job:
    """A handle that saves state after state to one branch."""

    def __init__(self, folder: Path, *, is_staged: bool = False) -> None:
        self._folder = folder
        self._staging = str(folder / "staging") if is_staged else None
        self.step = 0
        self.acknowledged = set[int]()
        self.open()
        self.save()

    def open(self) -> None:
        folder = self._folder
        self.store = tsck.open(folder / "store", create=True, cache_dir=folder / "cache", state_dir=folder / "state", staging=self._staging)
        if "job" in self.store.branches():
            self.restore()

    def put(self) -> int:
        """As training does; Ctrl-C may come meanwhile."""
        self.step += 1
        return self.store.put_snapshot(state(self.step), ref="job", step=self.step).step or 0

    def put_async(self) -> tsck.PendingSnapshot:
        self.step += 1
        return self.store.put_snapshot_async(state(self.step), ref="job", step=self.step)

    def wait(self) -> None:
        self.put_async().wait(PATIENCE_SECONDS)

    def restore(self) -> None:
        self.store.checkout("job")

    def gc(self) -> None:
        self.store.gc()

    def close(self) -> None:
        self.store.close()

    def save(self) -> None:
        """Nothing interrupts this one."""
        if self.step % 2:
            self.acknowledged.add(self.put())
        else:
            pending = self.put_async()
            pending.wait(PATIENCE_SECONDS)
            self.acknowledged.add(self.step)

    def require_sound(self) -> None:
        """One more save, what it saved comes back, and every earlier one is there."""
        self.save()
        found = self.store.checkout("job")
        assert torch.equal(found["weights"], state(self.step)["weights"])
        assert found["nest"]["step"] == self.step
        assert {each.step for each in self.store.log("job")} >= self.acknowledged
        assert not self.store.pending()


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((3000,), float(step)), "nest": {"turned": torch.full((4, 6), float(step)).t(), "step": step}}


def trials(action: Callable[[], object], soak_stride: int = 1) -> range:
    """Which lines of `action` get their Ctrl-C."""
    lines = interrupted(action, 0).lines
    return range(1, lines + 1, effort(usual=max(1, lines // TRIALS), soak=soak_stride))


@leaves_open_files
@pytest.mark.slow
@pytest.mark.race
@pytest.mark.timeout(effort(usual=600, soak=7200))
@pytest.mark.parametrize("is_staged", [False, True], ids=["store", "staging"])
@pytest.mark.parametrize("call", [Job.put, Job.put_async, Job.wait, Job.restore, Job.gc])
def test_ctrl_c_at_any_line(tmp_path: Path, call: Callable[[Job], object], *, is_staged: bool) -> None:
    job = Job(tmp_path, is_staged=is_staged)
    call(job)  # loads torch
    for at in trials(lambda: call(job), STAGED_STRIDE if is_staged else 1):
        where = interrupted(lambda: call(job), at).where
        try:
            job.require_sound()
        except Exception as exc:
            exc.add_note(f"after Ctrl-C at line {at}, {where}")
            raise
    job.close()
    job.open()
    job.require_sound()
    job.close()


@leaves_open_files
@pytest.mark.slow
@pytest.mark.race
@pytest.mark.timeout(effort(usual=600, soak=7200))
@pytest.mark.parametrize("is_staged", [False, True], ids=["store", "staging"])
def test_ctrl_c_at_any_line_of_a_close(tmp_path: Path, *, is_staged: bool) -> None:
    """The save in progress is published, by this close or the next one."""
    job = Job(tmp_path, is_staged=is_staged)
    ats = trials(job.close)
    job.open()
    for at in ats:
        job.put_async()
        where = interrupted(job.close, at).where
        job.close()
        job.open()
        assert job.step in {each.step for each in job.store.log("job")}, f"after Ctrl-C at line {at}, {where}"
        job.require_sound()
    job.close()


def test_ctrl_c_when_a_save_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole, and goes on; in each of the steps of the queue, the lock is free afterwards."""
    job, put = Job(tmp_path), Worker.put

    def interrupt(self: Worker[object], item: object) -> None:
        put(self, item)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            job.put_async()
    job.store.drain(PATIENCE_SECONDS)
    job.acknowledged.add(job.step)
    job.require_sound()
    job.close()


def test_ctrl_c_in_a_wait_keeps_no_lock() -> None:
    """At each line of a wait and of a notice."""
    changes, answers = Changes(), list[bool]()

    def run() -> None:
        changes.notify_all()
        changes.wait_for(lambda: True)
        with changes.lock:
            changes.notify_all()

    for at in range(1, interrupted(run, 0).lines + 1):
        interrupted(run, at)
        other = threading.Thread(target=lambda: answers.append(changes.wait_for(lambda: True, 0)), daemon=True)
        other.start()
        other.join(PATIENCE_SECONDS)
        assert len(answers) == at, f"the lock is taken after Ctrl-C at line {at}"


UNSAFE: Final = re.compile(
    r"\b(?:threading\.(?:Condition|Event|Semaphore|BoundedSemaphore|Barrier|Timer|Thread)|queue\.Queue|ThreadPoolExecutor)\("
)
ALLOWED: Final = {
    "backend/probe.py": "of `tsck probe`: its threads end with the command",
    "backend/save_duration.py": "as above",
    "backend/s3_multipart_writer.py": "the pieces of one object",
}


def test_no_lock_that_ctrl_c_can_keep() -> None:
    """`Changes`, `Flag`, `Helper` and `for_each` take the place of what the standard library has for threads: see common/waiting.py."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in Path(PACKAGE).rglob("*.py")}
    assert {name for name, source in sources.items() if UNSAFE.search(source)} == set(ALLOWED)


def test_no_loop_under_a_lock_that_tests_a_condition() -> None:
    """Ctrl-C between two turns of such a loop leaves the lock locked; the loop belongs in a function, which is called under the lock.

    Python 3.12 and 3.13 compile a conditional jump back to the head of a loop as two instructions, and leave the second one, the jump back,
    out of the exception table. Signal handlers run at a jump back. Python 3.13.0 looks up the handler by that instruction, and finds none:
    of 5,000 real signals for each form, up to 3,668 left the lock locked. Python 3.12.1 looks it up by the head of the loop: none of 5,000
    did, but an exception that a debugger, or the tracer of these tests, raises at that instruction does. Python 3.11 has no such gap.

    With the gap: `while condition`; a `for` that ends in an `if` without an `else`, a `match` or an `assert`; a list, set or dict
    comprehension with an `if`. Without it: a `for` that tests nothing, `while True`, an `if` before other statements, a generator
    expression, `filter`. The optimizer may turn one form into another: so the rule forbids every condition in the loop.
    """
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in _sources()}
    assert {f"{name}:{line}" for name, source in sources.items() for line in _conditional_loops_under_locks(source)} == set()


@pytest.mark.parametrize(
    "loop",
    [
        "while self.waiting: pass",
        "while True:\n    if self.waiting: break",
        "for each in self.waiting:\n    if each: each.end()",
        "for each in self.waiting:\n    assert each",
        "for each in self.waiting:\n    match each:\n        case 1: pass",
        "found = [each for each in self.waiting if each]",
        "if self.waiting: return {each: 1 for each in self.waiting if each}",
    ],
)
def test_the_loops_that_the_rule_finds(loop: str) -> None:
    assert _conditional_loops_under_locks("with self.lock:\n" + indent(loop, "    "))


@pytest.mark.parametrize(
    "loop",
    [
        "for each in self.waiting: each.end()",
        "found = [each for each in self.waiting]",
        "found = next((each for each in self.waiting if each), None)",
        "if self.waiting: self.waiting.pop()",
        "def later():\n    while self.waiting: pass",
    ],
)
def test_the_loops_that_the_rule_allows(loop: str) -> None:
    assert not _conditional_loops_under_locks("with self.lock:\n" + indent(loop, "    "))


def _sources() -> Iterator[Path]:
    """Of the package, and of the folders that are linked into it."""
    for folder in (Path(PACKAGE), *(path for path in Path(PACKAGE).iterdir() if path.is_symlink())):
        yield from folder.rglob("*.py")


def _conditional_loops_under_locks(source: str) -> list[int]:
    """Their lines. A lock is what `with` enters without a call."""
    blocks = [
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.With) and any(not isinstance(item.context_expr, ast.Call) for item in node.items)
    ]
    return [node.lineno for block in blocks for node in _inline(block) if isinstance(node, ast.stmt | ast.expr) and _has_condition(node)]


def _inline(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes, and those inside that Python compiles into the same function."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.GeneratorExp):
            yield node
            yield from _inline(ast.iter_child_nodes(node))


def _has_condition(node: ast.AST) -> bool:
    """Whether it is a loop that tests a condition."""
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
        return any(each.ifs for each in node.generators)
    if isinstance(node, ast.While) and not isinstance(node.test, ast.Constant):
        return True
    return isinstance(node, ast.For | ast.While) and any(
        isinstance(each, ast.If | ast.Match | ast.Assert | ast.While) for each in _inline(node.body)
    )
