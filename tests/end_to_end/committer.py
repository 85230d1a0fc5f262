"""Run by test_many_processes in processes of its own: saves snapshots as jobs would, and prints what was acknowledged."""

import json
import sys
from typing import Any

import torch

import tensorstore_ck as tsck


def put(store: tsck.Store, mode: str, worker: int, number: int) -> tuple[tsck.Snapshot, int]:
    """One save to the mode's ref, and how many conflicts came before it. Its state counts the saves that it builds on."""
    ref = ref_of(mode, worker)
    expect: Any = tsck.ANY if mode == "any" else tsck.LAST_SEEN
    content, conflicts = worker * 1000 + number, 0
    count = 0 if number == 0 else store.checkout(ref)["count"]
    while True:
        state = {"count": count + 1, "frozen": torch.arange(5000), "weights": torch.full((3000,), content)}
        try:
            return store.put_snapshot(state, ref=ref, expect=expect), conflicts
        except tsck.ConflictError:
            conflicts += 1
            count = store.checkout(ref)["count"]


def ref_of(mode: str, worker: int) -> str:
    return f"runs/{worker}" if mode == "own" else f"runs/{mode}"


def main(url: str, options: str, cache: str, worker: int, puts: int) -> None:
    torch.set_num_threads(1)
    store = tsck.open(url, storage_options=json.loads(options), cache_dir=cache)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(puts):
        for mode in ("shared", "any", "own"):
            snapshot, conflicts = put(store, mode, worker, number)
            said = {"mode": mode, "root": snapshot.root, "parent": snapshot.parent, "entry": snapshot.entry, "conflicts": conflicts}
            print(json.dumps(said), flush=True)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], worker=int(sys.argv[4]), puts=int(sys.argv[5]))
