"""Files of every kind, damaged at random: what comes in is what the original reader gives, or it is refused with an error of ours."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import tensorstore_ck as tsck
from tensorstore_ck.integrations.importing import import_checkpoint
from tests.effort import effort
from tests.integrations.importing.same import require_same
from tests.integrations.importing.test_safetensors import save_sharded
from tests.integrations.importing.test_torch_files import many_values

TRIES = effort(50, 1000)
Read = Callable[[Path], Any]


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(9, 7, generator=generator)
    values = {key: value for key, value in many_values().items() if key != "generators"}
    return {"weight": weight, "tied": weight, "row": weight[3], "half": weight.half(), "values": values, "list": [weight.t(), 1]}


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(60.0).reshape(5, 12), "b": torch.ones(7, dtype=torch.bfloat16), "c": torch.arange(5)}


def torch_zip(path: Path) -> None:
    torch.save(state(), path / "x")


def torch_legacy(path: Path) -> None:
    torch.save(state(), path / "x", _use_new_zipfile_serialization=False)


def safetensors(path: Path) -> None:
    save_file(tensors(), path / "x", {"format": "pt"})


def sharded(path: Path) -> None:
    save_sharded(path, tensors(), 2)


def dcp_folder(path: Path) -> None:
    dcp_save(
        {"model": tensors(), "step": 3, "values": [{"a": 1}, {"b": torch.ones(2)}]}, storage_writer=FileSystemWriter(path), no_dist=True
    )


def mutated(data: bytes, rng: random.Random) -> bytes:
    """With bits flipped, bytes set, a part cut out, doubled, or the end cut off."""
    found = bytearray(data)
    at = rng.randrange(len(found))
    match rng.randrange(6):
        case 0:
            del found[at:]
        case 1:
            del found[at : at + rng.choice((1, 4, 100))]
        case 2:
            found[at:at] = found[at : at + rng.choice((1, 8, 300))]
        case 3:
            found[at : at + 8] = rng.choice(
                (b"\xff" * 8, bytes(8), b"\x00\x00\x00\x00\x00\x00\x00\x80", b"....((((", b"RRRbbb..", b"h\x00h\x01h\x02aa")
            )
        case _:
            for _ in range(rng.choice((1, 1, 1, 5))):
                found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def read_torch(path: Path) -> Any:
    """With the few types that torch must be allowed to load; none that runs anything."""
    return torch.load(path / "x", weights_only=True)


def read_safetensors(path: Path) -> Any:
    try:
        return load_file(path / "x")
    except (SafetensorError, KeyError) as exc:
        raise AssertionError("the library refuses it") from exc


READERS: dict[Callable[[Path], None], Read | None] = {
    torch_zip: None,  # its checksums keep every change out
    torch_legacy: None,
    safetensors: read_safetensors,
    sharded: None,
    dcp_folder: None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", READERS)
def test_mutations(store: tsck.Store, tmp_path: Path, save: Callable[[Path], None]) -> None:
    rng = random.Random(save.__name__)
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    save(good)
    place = Path("x" if (good / "x").exists() else ".")
    import_checkpoint(store, good / place, ref="good")
    expected = store.checkout("good")
    files = sorted(path for path in good.iterdir() if path.stat().st_size)
    refused = 0
    for number in range(TRIES):
        shutil.copytree(good, bad)
        file = rng.choice(files)
        (bad / file.name).write_bytes(mutated(file.read_bytes(), rng))
        try:
            snapshot, _ = import_checkpoint(store, bad / place, ref=f"bad/{number}")
        except tsck.StoreError:
            refused += 1
        else:
            found = store.checkout(snapshot.root)
            reader = READERS[save]
            if reader is not None:
                theirs = reader(bad)
                require_same(found, {name: theirs[name] for name in sorted(theirs)})
            elif save is torch_zip:
                require_same(found, expected)
        shutil.rmtree(bad)
    assert refused > TRIES // 4
    assert len(store.branches()) == 1 + TRIES - refused


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", READERS)
def test_files_that_are_cut_off(store: tsck.Store, tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path)
    place = tmp_path / ("x" if (tmp_path / "x").exists() else ".")
    for path in sorted(path for path in tmp_path.iterdir() if path.is_file() and path.stat().st_size):
        data = path.read_bytes()
        for size in {0, 1, 7, 8, 9, len(data) - 1, *range(0, len(data), max(1, len(data) // effort(12, 40)))}:
            path.write_bytes(data[:size])
            with pytest.raises(tsck.StoreError):
                import_checkpoint(store, place, ref="bad")
        path.write_bytes(data)
    import_checkpoint(store, place, ref="bad")
