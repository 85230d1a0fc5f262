"""`tensorstore_ck` loads each public name when it is first used."""

import inspect
import pickle
import subprocess
import sys

import pytest

import tensorstore_ck
import tensorstore_ck as tsck
from tensorstore_ck.store import OpenOptions
from tests.effort import PATIENCE_SECONDS


def test_importing_the_package_loads_little() -> None:
    code = "import sys, tensorstore_ck; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    ).stdout.split()
    assert [name for name in loaded if name.startswith("tensorstore_ck") and name != "tensorstore_ck"] == []
    assert not {"torch", "numpy", "fsspec", "click", "rich", "sqlalchemy", "psycopg", "logging", "dataclasses"} & set(loaded)
    assert tsck.errors.StoreError is tsck.StoreError


def test_dir_lists_the_public_names_alone() -> None:
    assert sorted(dir(tsck)) == sorted(tsck.__all__)
    assert not [name for name in dir(tsck) if name.startswith("_")]
    assert {"ANY", "Store", "StoreError", "copy", "open", "verify_resume"} <= set(tsck.__all__)


FIRST = """
import os, sys, torch, tensorstore_ck
for name in ("Box", "FsckOptions", "GcOptions", "Snapshot", "Staging", "Store", "Streams", "TrainingState", "copy", "import_history"):
    if os.fork() == 0:
        getattr(tensorstore_ck, name)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(name)
"""


@pytest.mark.slow
def test_any_area_can_be_loaded_first() -> None:
    """No other import hides a circle."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nope"):
        _ = tensorstore_ck.nope  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"you may want tensorstore_ck\.open\(URL\)\.checkout\(ADDRESS\)"):
        _ = tensorstore_ck.load  # type: ignore[attr-defined]
    assert not hasattr(tensorstore_ck, "save")


ADAPTERS = """
import sys, tensorstore_ck as tsck
for name in ("accelerate", "deepspeed", "hf", "lightning", "megatron", "mlflow", "nvrx", "ray", "titan", "wandb"):
    assert hasattr(tsck, name) and name in dir(tsck)
from tensorstore_ck import hf
assert not {"torch", "transformers", "tensorstore_ck.integrations"} & set(sys.modules)
sys.modules["transformers"] = None
try:
    hf.Trainer
except tsck.MissingExtraError as exc:
    print(exc.kind, len(exc.__notes__), exc.__traceback__.tb_next)
"""


def test_adapters_are_listed_and_loaded_when_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", ADAPTERS], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS)
    assert done.stdout.split() == ["missing_extra", "1", "None"]


def test_public_classes_are_the_same_as_in_their_modules() -> None:
    from tensorstore_ck import errors
    from tensorstore_ck.store import Store, open_store

    assert tsck.Store is Store
    assert tsck.open is open_store
    with pytest.raises(tsck.StoreError):
        raise errors.NotFoundError("nothing there")
    for name in tsck.__all__:
        if isinstance(found := getattr(tsck, name), type):
            assert pickle.loads(pickle.dumps(found)) is found


def test_functions_have_their_public_names() -> None:
    functions = {name: found for name in tsck.__all__ if inspect.isfunction(found := getattr(tsck, name))}
    assert {name: found.__qualname__ for name, found in functions.items()} == {name: name for name in functions}
    with pytest.raises(TypeError, match=r"^open\(\) got an unexpected keyword argument 'creat'"):
        tsck.open("store", creat=True)  # type: ignore[call-overload]


def test_what_passes_options_on_knows_those_of_open() -> None:
    parameters = inspect.signature(tsck.open).parameters.values()
    assert {each.name for each in parameters if each.kind is each.KEYWORD_ONLY} == OpenOptions.__annotations__.keys()
