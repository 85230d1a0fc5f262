"""Every block of Python in README.md and docs runs: those of a page in order, as if they were one program.

Names that a page does not define, such as `store` and `model`, are those of `PREPARED`. Whole programs (``# train.py: ...``) are run by
tests/end_to_end/scripts. A block that cannot run here stands after a line ``<!-- not run: why -->``.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tensorstore_ck.store import Store
from tests import documents, servers

pytestmark = pytest.mark.slow
PREPARED = """
import signal, torch, tensorstore_ck as tsck
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

def train(batch):
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

dataset = TensorDataset(torch.randn(512, 32))
cursor = tsck.SampleCursor(len(dataset), batch_size=8)
loader, start, epochs, group, pg, rank, world_size = range(100, 201, 20), 100, 1, None, None, 0, 1
training = tsck.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=cursor)
store = tsck.open("./ckpt", create=True)
for step in (800, 900, 999, 1000):
    train(None)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    store.put_snapshot(state, ref="runs/gpt", step=step, metrics={"val_loss": 1 / step})
step, total, loss = 1001, 1003, 0.5
"""
"""Run before the blocks of each page."""
BUCKET = "tsck.open('s3://bucket/ckpt', create=True).close()\n"
ONE_RANK = """
import torch.distributed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
group = pg = torch.distributed.group.WORLD
train(None)
"""
MORE = {
    "guides/bisect.md": "torch.nn.init.constant_(model[2].bias, float('nan'))\n"
    "store.put_snapshot({'model': model.state_dict()}, ref='runs/gpt', step=1001, unchanged='ok')",
    "guides/async-saves.md": BUCKET + "start = 1002",
    "guides/catalog.md": "noted = {'attributes': {'lr': 1e-5}, 'metadata': {'config': {'dropout': 0.1}}, 'unchanged': 'ok'}\n"
    "store.put_snapshot(state, ref='runs/gpt', step=1001, metrics={'val_loss': 0.5}, **noted)",
    "guides/codecs.md": BUCKET,
    "guides/data-order.md": ONE_RANK + "cursor = tsck.SampleCursor(512, batch_size=256, seed=1)\nstate['data'] = cursor.state_dict()\n"
    "store.put_snapshot(state, ref='runs/gpt', step=1001, group=pg, rank_state={'rng': torch.get_rng_state()})\nstep = 1002",
    "guides/exit-codes.md": "train(None)",
    "guides/many-ranks.md": ONE_RANK,
    "index.md": "def train(step):\n    return 1 / step",
    "guides/resume.md": "train(None)",
    "guides/staging.md": BUCKET,
    "guides/when-to-save.md": "store.close()\nstore = tsck.open('./fresh', create=True)\ntotal = 3",
}
"""And this before those of one page."""
MAYBE = [page for page in documents.PAGES if any(not documents.script_name(block) for _, block in documents.python_blocks(page))]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moto_server: servers.S3Server) -> Iterator[dict[str, Any]]:
    """The variables of a page, in a folder of its own, with S3 where the environment says."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "AWS_ACCESS_KEY_ID": servers.KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": moto_server.endpoint,
        "MPLBACKEND": "agg",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(moto_server.client()) as client:
        client.create_bucket(Bucket="cold-bucket")
    found: dict[str, Any] = {"key": servers.KEY, "secret": servers.SECRET, "endpoint": moto_server.endpoint}
    yield found
    for value in found.values():
        if isinstance(value, Store):
            value.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_block_is_passed_over_only_where_a_line_says_why() -> None:
    for page in documents.PAGES:
        text = documents.text(page)
        passed_over = text.count("\n```python\n") - len(list(documents.python_blocks(page)))
        assert passed_over == len(re.findall(r"^<!-- not run: .+ -->$", text, re.MULTILINE)), page


def test_few_blocks_do_not_run() -> None:
    assert len(MAYBE) >= 15
    reasons = [reason for page in documents.PAGES for reason in re.findall(r"<!-- not run: (.*?) -->", documents.text(page))]
    examples = [found[1] for reason in reasons if (found := re.fullmatch(r"examples/(\w+)\.py is run", reason))]
    tests = "".join(path.read_text() for path in (documents.REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for name in examples if name not in tests] == []
    assert len(reasons) - len(examples) <= 2


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("page", MAYBE, ids=[page.relative_to(documents.REPOSITORY).as_posix() for page in MAYBE])
def test_the_blocks_of_a_page_run(tmp_path: Path, page: Path, names: dict[str, Any]) -> None:
    more = MORE.get(page.relative_to(documents.DOCS).as_posix(), "") if page != documents.README else ""
    here = {"s3://bucket": f"s3://bucket/{tmp_path.parent.name}/{tmp_path.name}", '"/ckpt"': '"./ckpt"'}
    here |= {"/nvme/stage": str(tmp_path / "stage"), "500GB": "1GB"}

    def run(code: str, origin: str) -> None:
        for told, meant in here.items():
            code = code.replace(told, meant)
        exec(compile(code, origin, "exec"), names)

    run(PREPARED + more, "prepared")
    for line, block in documents.python_blocks(page):
        if not documents.script_name(block):
            run("\n" * line + block, str(page))
