"""Runs Megatron-LM's pretrain_gpt.py on CPUs: ``run_megatron_lm.py CHECKOUT FOLDER stock|stored RANKS ARGUMENTS...``.

It needs the environment of `make test-apart`. CHECKOUT: the sources of Megatron-LM core_v0.16.1; or of core_v0.19.0, with the absolute path
of .venv-apart/newest-megatron in PYTHONPATH. On Python 3.11 stock saves of the latter also need a sitecustomize.py that sets
`typing.override`, since Megatron-LM imports it in processes that it spawns. FOLDER: for the store, and what the ranks say. ARGUMENTS:
Megatron-LM's own, after those below. ``stored`` runs the script by `run_script` of tsck.megatron, as docs/trainers/megatron.md says, and
saves to the ref REF; local checkpoints are those of tsck.nvrx. It prints what the first rank says;
each rank ends with a hash of its weights, moments and generators, which a resumed job must have, too.
"""

import functools
import hashlib
import multiprocessing
import os
import random
import runpy
import socket
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch._dynamo
from megatron_on_cpu import on_cpu

ARGUMENTS = (  # noqa: SIM905 - as a command line
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1"
    " --global-batch-size 4 --lr 0.01 --min-lr 0.001 --lr-decay-style cosine --lr-warmup-iters 2 --train-iters 8 --weight-decay 0.1"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 --eval-iters 0 --eval-interval 1000"
    " --transformer-impl local --use-cpu-initialization --distributed-backend gloo --bf16 --use-distributed-optimizer"
    " --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-persist-layer-norm"
    " --no-rope-fusion --attention-backend unfused --log-interval 1 --num-workers 0 --ckpt-format torch_dist --save-interval 4"
    " --no-create-attention-mask-in-dataloader"
).split()


def be_rank(checkout: Path, folder: Path, which: str, rank: int, arguments: list[str]) -> NoReturn:
    """Runs the script in this process."""
    code = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import megatron.core.tensor_parallel.random  # noqa: PLC0415
        from megatron.training import initialize, training  # noqa: PLC0415

        initialize._compile_dependencies = lambda: None  # the package has the helpers, and kernels need CUDA
        megatron.core.tensor_parallel.random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        held: dict[str, Any] = {}
        training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
        original = training.setup_model_and_optimizer

        def setup(*args: Any, **options: Any) -> Any:
            held["model"], held["optimizer"], scheduler = original(*args, **options)
            return held["model"], held["optimizer"], scheduler

        training.setup_model_and_optimizer = setup
        training.train_step = with_loss(training.train_step)
        training.build_train_valid_test_data_iterators = without_draws(training.build_train_valid_test_data_iterators)
        script, arguments = str(checkout / "pretrain_gpt.py"), [*ARGUMENTS, *arguments]
        if which == "stored":
            run_stored(script, folder, arguments)
        else:
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
        print(f"\nrank {rank} ends with {digest(held['model'], held['optimizer'])}")
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except Exception:  # noqa: BLE001 - the process ends below, without a traceback of Python's
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for child in multiprocessing.active_children():  # of Megatron's writer, which would outlive this process
            child.kill()
        os._exit(code)


def with_loss(step: Any) -> Any:
    """A function that prints each iteration's own loss: the second line of Megatron's log in a process has the mean of two iterations."""

    def stepped(*args: Any, **options: Any) -> Any:
        found = step(*args, **options)
        print(*(f"\nloss of this iteration: {float(each).hex()}" for each in found[0].values()), flush=True)
        return found

    return stepped


def without_draws(make: Any) -> Any:
    """A function that makes data loaders, which draw from the CPU's generator. Here that is CUDA's, too, which they do not touch."""

    def made(*args: Any, **options: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return make(*args, **options)

    return made


def run_stored(script: str, folder: Path, arguments: list[str]) -> None:
    """As docs/trainers/megatron.md says: the script as it is, with flags of the store in front."""
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager  # noqa: PLC0415

    import tensorstore_ck as tsck  # noqa: PLC0415
    from tensorstore_ck.integrations.megatron import run_script  # noqa: PLC0415

    local_manager.LocalCheckpointManager = tsck.nvrx.LocalCheckpointManager
    run_script.main(["--store", str(folder / "store"), "--ref", os.environ.get("REF", "runs/gpt"), script, *arguments])


def digest(model: list[Any], optimizer: Any) -> str:
    """Of the weights, of what the optimizer has, and of the generators."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    for each in model:
        add(dict(each.named_parameters()))
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        add([list(held.values()) for held in each.optimizer.state.values()])
        add([group["params"] for group in each.optimizer.param_groups])
    from megatron.core import tensor_parallel  # noqa: PLC0415

    add([random.getstate(), np.random.get_state(), torch.get_rng_state(), tensor_parallel.get_cuda_rng_tracker().get_states()])
    return found.hexdigest()


def main() -> int:
    """See the module."""
    if len(sys.argv) < 5 or sys.argv[3] not in ("stock", "stored"):
        sys.exit(__doc__)
    checkout, folder, which, ranks = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3], int(sys.argv[4])
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(OMP_NUM_THREADS="1", RES_OPTIONS="timeout:1 attempts:1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    on_cpu(patience_seconds=300)
    sys.path[:0] = [str(checkout)]
    import megatron  # noqa: PLC0415

    megatron.__path__ = [*megatron.__path__, str(checkout / "megatron")]  # for megatron.training, which the package lacks
    import megatron.training.training  # noqa: PLC0415 - once for all ranks

    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            be_rank(checkout, folder, which, rank, sys.argv[5:])
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print((folder / "rank-0.log").read_text())
    for rank in range(1, ranks):
        print((folder / f"rank-{rank}.log").read_text().rstrip().rpartition("\n")[2])
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
