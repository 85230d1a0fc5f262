"""DeepSpeed's engine with its own checkpoints and over a store: `python -m benches.trainers_deepspeed deepspeed --folder /tmp/bench`.

In the environment of `make test-apart`: 10 checkpoints of one rank with ZeRO 2 in bfloat16, as `benches.trainers` has others.
`python -m benches.trainers_deepspeed kills /tmp/bench` kills a rank of two with -9 at each point of a save: see `_rank_kills`.
"""
# ruff: noqa: I001 - on_cpu comes before anything that imports DeepSpeed

import hashlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.integrations.deepspeed.on_cpu import deepspeed

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tensorstore_ck as tsck
from benches._rank_kills import SAVED_AFTER, Job, Strike, kill_table, watched_files
from benches._trainers_common import EACH, KILLED_SAVE, STEPS, Kill, Report, Trainers, main
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.integrations.deepspeed.fragments import base_optimizer, fragments_of
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tensorstore_ck.training.parameter_names import ParameterNames
from tests.end_to_end.crash.faulty import FaultyBackend
from tests.integrations.deepspeed.engines import Kind, join, make, train

WORDS, LENGTH = 2048, 32
STAGE: Final = 2


def state_of(engine: Any) -> str:
    """A hash of this rank's weights, masters and moments, and of the counters."""
    found = hashlib.sha256(str((engine.global_steps, getattr(engine.lr_scheduler, "last_epoch", None))).encode())
    state = base_optimizer(engine.optimizer).state
    for each in fragments_of(engine.optimizer, ParameterNames({"": engine.module})):
        moments = [] if each.flat is None else [each.flat, *(value for _, value in sorted(state.get(each.flat, {}).items()))]
        for tensor in (each.weights, *moments):
            found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _saves(engine: Any, folder: Path, strike: Strike, tag: str | None) -> dict[str, str]:
    states = {}
    for step in range(SAVED_AFTER[-1]):
        train(engine, int(os.environ["RANK"]), range(step, step + 1))
        if step + 1 == SAVED_AFTER[-1]:
            with watched_files(folder / "out", strike), strike.counting():
                engine.save_checkpoint(folder / "out", tag=tag)
        elif step + 1 in SAVED_AFTER:
            engine.save_checkpoint(folder / "out", tag=tag)
        states[str(step + 1)] = state_of(engine)
    return states


def _native_job(kind: Kind, tag: str | None) -> Job:
    def save(folder: Path, strike: Strike) -> dict[str, str]:
        join()
        return _saves(make(kind), folder, strike, tag)

    def load(folder: Path) -> tuple[int, str]:
        join()
        engine = make(kind)
        engine.load_checkpoint(folder / "out")
        return engine.global_steps, state_of(engine)

    return Job(f"DeepSpeed, ZeRO {kind.stage}, {'a tag for each step' if tag is None else 'one tag for all saves'}", save, load)


def _store_job(kind: Kind, tag: str | None) -> Job:
    def attached(folder: Path, strike: Strike) -> tuple[Store, Any]:
        join()
        local = LocalBackend(str(folder / "store"))
        config = read_config(local) or init_store(local)
        store = Store(make_engine(FaultyBackend(local, strike, atomic_put=False), config, MemoryTable()))
        engine = make(kind)
        tsck.deepspeed.attach(engine, store, ref="runs/a", asynchronous=False)
        return store, engine

    def save(folder: Path, strike: Strike) -> dict[str, str]:
        store, engine = attached(folder, strike)
        states = _saves(engine, folder, strike, tag)
        store.close()
        return states

    def load(folder: Path) -> tuple[int, str]:
        _, engine = attached(folder, Strike(None))
        engine.load_checkpoint(folder / "out")
        return engine.global_steps, state_of(engine)

    return Job(
        f"tensorstore_ck.deepspeed, ZeRO {kind.stage}, {'a tag for each step' if tag is None else 'one tag for all saves'}", save, load
    )


def _kill_jobs() -> list[Job]:
    native = [_native_job(Kind(stage, "bf16"), tag) for tag in (None, "last") for stage in (2, 3)]
    return [*native, *(_store_job(Kind(stage, "bf16"), tag) for stage, tag in ((2, None), (3, None), (2, "last")))]


def _engine() -> Any:
    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": STAGE},
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=5e-5), config=config)
    return engine


def with_deepspeed(folder: Path, *, native: bool, end: int = 0, resume: bool = False, kill: Kill | None = None) -> Report:
    """A run of one rank up to `end`, or to its own; what was measured of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    join()
    if kill is not None and native:
        kill.arm(torch, "save", file="optim_states")
    elif kill is not None:
        kill.arm_store()
    engine, out = _engine(), folder / "out"
    stalls, losses, first_step, began = list[float](), list[tuple[int, float]](), 0.0, time.perf_counter()
    if not native:
        tsck.deepspeed.attach(engine, tsck.open(folder / "store", create=True, cache_dir=folder / "cache"), ref="runs/bench")
    if resume:
        engine.load_checkpoint(out)
    while engine.global_steps < (end or STEPS):
        first_step = first_step or time.perf_counter()
        words = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(engine.global_steps))
        loss = engine(input_ids=words, labels=words).loss
        engine.backward(loss)
        engine.step()
        losses.append((engine.global_steps, loss.item()))
        if kill is not None and engine.global_steps == KILLED_SAVE:
            kill.strike()
        if engine.global_steps % EACH == 0:
            saving = time.perf_counter()
            engine.save_checkpoint(out)
            stalls.append(time.perf_counter() - saving)
    weights, step = state_of(engine), engine.global_steps
    engine.destroy()
    return {"stalls": stalls, "until_first_step": first_step - began, "losses": losses, "weights": weights, "step": step}


TRAINERS: Final[Trainers] = {"deepspeed": (with_deepspeed, "tensorstore_ck.deepspeed")}


if __name__ == "__main__":
    if sys.argv[1:2] == ["kills"]:
        kill_table(_kill_jobs(), Path(sys.argv[2]) / "kills")
    else:
        main(__doc__, TRAINERS)
