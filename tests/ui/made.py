"""Two stores for the pages: a small training run with all that may happen to one, and one whose names try to break the pages.

The first is made by a clock and ids of its own, so that it is the same each time: the pictures in the documentation show it.
"""

import itertools
import math
import warnings
from typing import Final

import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.read_only import ReadOnlyBackend
from tensorstore_ck.common.ids import ULID_BYTES, Ulid
from tensorstore_ck.engine.opening import make_engine
from tensorstore_ck.format.store_config import BLOCK_BYTES, CONFIG_NAME, STORE_FORMAT, StoreConfig
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.catalog.made import publish

BEGIN_NS: Final = 1_763_971_200 * 10**9
"""2025-11-24 08:00 UTC."""
SECOND: Final = 10**9
TRAINING_URL: Final = "s3://lab/ckpt"
TRAINING_UUID: Final = "5c0ffee0-7e57-4a11-8aaa-0123456789ab"
EVIL: Final = """</script><!--"'><script>window.owned=1</script><img src=x onerror="window.owned=1">{{7*7}} \N{PILE OF POO}\u202e"""
LONG: Final = ("W" * 300)[:255]


class StepClock:
    """Stands still until it is moved."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def pass_seconds(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)


class Gpt(torch.nn.Module):
    """Predicts the next of a few symbols from the last ones."""

    def __init__(self, symbols: int = 64, width: int = 16, context: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(symbols, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width * context, width * context) for _ in range(2))
        self.norm = torch.nn.LayerNorm(width * context)
        self.head = torch.nn.Linear(width * context, symbols)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).flatten(1)
        for layer in self.layers:
            hidden = hidden + torch.nn.functional.gelu(layer(hidden))
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


class Run:
    """A training loop that can be restored, diverge, and be started again by another process."""

    def __init__(self, store: Store, clock: StepClock, rate: float) -> None:
        self._store, self._clock = store, clock
        torch.manual_seed(0)
        self.model = Gpt()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self._draw = torch.Generator().manual_seed(1)
        self._table = torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(2))

    def _loss(self) -> torch.Tensor:
        tokens = torch.randint(0, 64, (32, 8), generator=self._draw)
        return torch.nn.functional.cross_entropy(self.model(tokens), self._table[tokens[:, -1], tokens[:, -2] % 8])

    def train(self, ref: str, first: int, last: int, every: int = 20, blow_up_at: int | None = None) -> None:
        """Steps, with a save after every few of them."""
        for step in range(first, last + 1):
            loss = self._loss()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if step == blow_up_at else 1.0)
            self.optimizer.step()
            if blow_up_at is not None and step >= blow_up_at:
                with torch.no_grad():
                    self.model.head.weight.mul_(1.04 if step < blow_up_at + 30 else math.nan)
            if step % every == 0:
                self._clock.pass_seconds(600 + 7 * (step % 13))
                with torch.no_grad():
                    held_out = self._loss()
                self._store.put_snapshot(
                    {
                        "model": self.model.state_dict(),
                        "optimizer": self.optimizer.state_dict(),
                        "data": {"epoch": step // 200, "at": step},
                    },
                    ref=ref,
                    step=step,
                    metrics={
                        "loss": loss.item(),
                        "val_loss": held_out.item(),
                        "grad_norm": norm.item(),
                        "learning_rate": self.optimizer.param_groups[0]["lr"],
                    },
                    metadata={"config": {"width": 16, "layers": 2, "batch": 32}, "git": "1f0c2ab", "seed": 0},
                    unchanged="ok",
                )

    def restore(self, address: str, rate: float) -> None:
        """Goes on from a snapshot, with another learning rate."""
        state = self._store.checkout(address)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = rate


class TrainingStore:
    """A store in memory with three branches: one that diverged and was rolled back, one from it, and one that stopped.

    It says that it is in a bucket. `store` writes to it, `open` opens it for reading.
    """

    def __init__(self) -> None:
        self.clock = StepClock(BEGIN_NS)
        self._backend = MemoryBackend(clock=self.clock)
        self._backend.url = TRAINING_URL
        self._config = StoreConfig(STORE_FORMAT, TRAINING_UUID, BLOCK_BYTES, "blake3", (), "log", True)
        self._backend.create(CONFIG_NAME, self._config.encode())
        self._numbers = itertools.count()
        self.store = Store(make_engine(self._backend, self._config, MemoryTable(), clock=self.clock, new_id=self._new_id))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tsck.SuspiciousSaveWarning)  # the run diverges
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # more only get in each other's way, and round otherwise
            try:
                _train(self.store, self.clock)
            finally:
                torch.set_num_threads(threads)

    def open(self, _: str = TRAINING_URL) -> Store:
        backend = ReadOnlyBackend(self._backend)
        return Store(make_engine(backend, self._config, MemoryTable(), clock=self.clock, read_only=True))

    def _new_id(self) -> Ulid:
        return Ulid((self.clock() // 1_000_000).to_bytes(6, "big") + next(self._numbers).to_bytes(ULID_BYTES - 6, "big"))


def _train(store: Store, clock: StepClock) -> None:
    def as_process(actor: str) -> None:
        store.engine.log._actor = actor

    as_process("ada@node3:2201")
    Run(store, clock, 1e-3).train("runs/bert", 10, 120, every=10)
    clock.pass_seconds(86_400)
    as_process("ada@node7:4711")
    run = Run(store, clock, 3e-3)
    run.train("runs/gpt", 1, 200)
    as_process("ada@node7:5260")  # restarted
    run.train("runs/gpt", 201, 340, blow_up_at=270)
    store.mark("runs/gpt@300", reason="loss went to NaN after step 270")
    store.mark("runs/gpt@320", reason="loss went to NaN after step 270")
    store.mark("runs/gpt@340", reason="loss went to NaN after step 270")
    store.reset("runs/gpt", "runs/gpt@260")
    as_process("ada@node7:5993")
    run.restore("runs/gpt", 1e-3)
    run.train("runs/gpt", 261, 500)
    store.branch("runs/gpt-slow", "runs/gpt@200")
    as_process("bo@node2:901")
    run.restore("runs/gpt-slow", 3e-4)
    run.train("runs/gpt-slow", 201, 320)
    store.tag("paper/figure-2", "runs/gpt@400")
    store.pin("runs/gpt@360", reason="evaluated on held-out sets", owner="bo", expires="30d")
    store.annotate("runs/gpt@400", {"eval/accuracy": 0.913})
    store.set_policy("runs/gpt*", keep_last=12, keep_every=100, keep_best=(2, "val_loss", "min"))
    as_process("cron@node1:77")
    store.apply_policies()
    clock.pass_seconds(3 * 86_400)
    store.gc(tsck.GcOptions(min_age_seconds=0, max_delete=1.0))
    clock.pass_seconds(600)
    as_process("ada@node7:6105")
    run.restore("runs/gpt", 1e-3)
    run.train("runs/gpt", 501, 560)
    store.forget("runs/gpt-slow@240")
    clock.pass_seconds(240)


def nasty_store(store: Store) -> None:
    """Snapshots whose names hold markup, quotes, and as many characters as they may."""
    store.engine.log._actor = f"{EVIL}@host:1"
    ref = "/".join(["W" * 31] * 7 + ["W" * 31])
    metrics: dict[str, float] = {EVIL: 1.0, LONG: math.nan, "quote's \"": math.inf, ".": -1e300, "loss": 0.5}
    for step in (1, 2, 3):
        tensors = {EVIL: torch.full((2,), float(step)), LONG: torch.zeros(2), "deep": {EVIL: {LONG: torch.ones(1) * math.nan}}}
        state = {**tensors, "text": EVIL * 20, "key\n\t": [EVIL], "number": step}
        store.put_snapshot(state, ref=ref, step=step, metrics=metrics, metadata={EVIL: {LONG: EVIL}, "note": EVIL}, unchanged="ok")
    store.put_snapshot({"w": torch.zeros(1)}, ref="runs/none")
    store.tag("t" * 128 + "/" + "t" * 126, f"{ref}@1")
    store.pin(f"{ref}@2", reason=EVIL + LONG, owner=EVIL)
    store.mark(f"{ref}@1", "bad", reason=EVIL * 10)
    publish(store, "runs/made", 2**62, dict.fromkeys(metrics, 0.0), logical_bytes=2**62, new_bytes=2**62)
