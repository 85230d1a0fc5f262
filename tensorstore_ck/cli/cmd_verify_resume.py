"""The command verify-resume: does a job resume bit for bit? It runs code of the user."""

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import click

from tensorstore_ck.cli.complete_names import complete_address
from tensorstore_ck.cli.options import StoreChoice, command, store_options
from tensorstore_ck.cli.output import emit, green, printable, red

if TYPE_CHECKING:
    from tensorstore_ck.training.verify_resume import MakeJob

DIFFERS_EXIT: Final = 3  # Python exits with 1 when the user's code raises


@command(
    "Run a job twice from one snapshot, and name the first tensor that differs.",
    "tsck verify-resume train.py:make --ref runs/gpt",
    "tsck verify-resume my.jobs.train:make --ref runs/gpt@1000 --steps 10",
)
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option("--ref", "address", required=True, shell_complete=complete_address, metavar="ADDRESS", help="The snapshot to resume from.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, metavar="N", help="How many steps to run each time.")
@store_options()
@click.pass_context
def verify_resume(context: click.Context, function: str, address: str, steps: int, choice: StoreChoice, *, as_json: bool) -> None:
    """Resume from a snapshot twice, run some steps each time, and compare the resulting states bit by bit. Exits with 3 if they differ.

    MODULE is a module's name or a path to a .py file, and is imported: this runs your code. FUNCTION takes no arguments, builds the job,
    and returns its tsck.TrainingState and a function that runs one step. The store is not changed. Only what the TrainingState holds is
    compared.
    """
    make = load_function(function)
    from tensorstore_ck.training import verify_resume as verify  # noqa: PLC0415 - loads torch

    with choice.look() as store:
        report = verify(make, store, address, steps)
    colour = green if report.ok else red
    emit({"ok": report.ok, "report": report}, [colour(printable(report))], as_json=as_json)
    if not report.ok:
        context.exit(DIFFERS_EXIT)


def load_function(text: str) -> "MakeJob":
    """The function that ``MODULE:FUNCTION`` names; its module is imported."""
    name, colon, attribute = text.rpartition(":")
    if not colon or not name or not attribute:
        raise click.BadParameter(f"{text!r} is not MODULE:FUNCTION.", param_hint="MODULE:FUNCTION")
    module = _load_file(name) if name.endswith(".py") else _load_module(name)
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise click.BadParameter(f"{name} has no function {attribute!r}.", param_hint="MODULE:FUNCTION")
    return function  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise  # something that the user's module imports
        raise click.BadParameter(
            f"there is no module {name!r} here: give a path that ends with .py?", param_hint="MODULE:FUNCTION"
        ) from exc
    finally:
        sys.path.remove(os.getcwd())


def _load_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise click.BadParameter(f"there is no file {path!r}.", param_hint="MODULE:FUNCTION")
    folder, file = os.path.split(os.path.abspath(path))
    name = file.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)  # as `python FILE` does
    sys.modules.setdefault(name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
