"""`tsck plan`: bytes a parameter, what a policy keeps, intervals and money, from a count, a config or an index."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Result, Tsck

LLAMA = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
MIXTRAL = {
    **LLAMA,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "vocab_size": 32000,
}


@pytest.fixture
def plan(tsck: Tsck) -> Any:
    def run(*arguments: str) -> dict[str, Any]:
        found: Result = tsck("plan", *arguments, "--json")
        assert found.code == 0, found.err
        document: dict[str, Any] = found.json
        return document

    return run


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("", [2, 4, 8]),
        ("--no-master", [2, 8]),
        ("--dtype fp32", [4, 8]),
        ("--dtype fp8 --optimizer sgd", [1, 4]),
        ("--optimizer adamw8bit", [2, 4, 2]),
        ("--dtype fp16 --optimizer lion", [2, 4, 4]),
    ],
)
def test_bytes_a_parameter(plan: Any, options: str, parts: list[int]) -> None:
    found = plan("--params", "2B", "--gbps", "1", *options.split())
    assert [*found["parts"].values()] == parts
    assert found["bytes_per_snapshot"] == 2_000_000_000 * sum(parts)


def test_times_saves_and_money(plan: Any) -> None:
    job = "--params 1B --dtype fp32 --ranks 4 --days 1 --every 50s --keep 3 --keep-every 6h"
    found = plan(*f"{job} --gbps 2 --read 4GB --stall 10s --price 0.5".split())
    assert (found["save_seconds"], found["restore_seconds"], found["saves"]) == (6, 3, 1440)
    assert found["files_per_snapshot"] == 4 * (1 + 45) + 2
    assert found["kept"] == 3 + 4, "the newest, and the first of each quarter of the day; the last quarter begins with the newest"
    assert found["kept_bytes"] == found["kept"] * 12_000_000_000
    assert found["usd_per_month"] == pytest.approx(found["kept"] * 12 * 0.5)
    assert found["kept_bytes_small"] / found["kept_bytes"] == pytest.approx(0.67)
    assert found["assumed"] == ["restart", "mtbf"]
    assert found["costs"]["mtbf"] == 50_000 * 3600 / 4
    assert found["young_interval"] == pytest.approx(math.sqrt(2 * 10 * found["costs"]["mtbf"]))
    assert found["training_share"] < found["best_training_share"]
    assert found["stall_share"] == pytest.approx(1 / 6)


def test_the_best_interval_is_the_default(plan: Any) -> None:
    found = plan("--params", "70B", "--ranks", "512", "--gbps", "40", "--mtbf", "4h")
    assert found["interval"] == found["best_interval"]
    assert found["costs"]["stall"] == pytest.approx(70e9 * 14 / 512 / 10e9)


def test_a_save_that_takes_longer_than_the_interval(tsck: Tsck) -> None:
    shown = tsck("plan", "--params", "70B", "--gbps", "0.1", "--every", "30m").out
    assert "a save takes longer than the 30 min until the next one" in shown
    assert "takes longer" not in tsck("plan", "--params", "70B", "--gbps", "10", "--every", "30m").out
    assert "USD" not in shown


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LLAMA, 70.55),
        (GPT2, 0.124),
        ({**MIXTRAL, "num_local_experts": 8}, 46.7),
        ({"text_config": LLAMA}, 70.55),
        ({**LLAMA, "tie_word_embeddings": True}, 69.5),
    ],
)
def test_the_parameters_of_a_config(plan: Any, tmp_path: Path, config: dict[str, Any], billions: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in ("config.json", "."):
        found = plan(given, "--gbps", "1")
        assert found["parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
        assert found["parameters_from"] == "estimated from config.json"


@pytest.mark.parametrize(
    ("metadata", "dtype", "count"),
    [
        ({"total_size": 2000}, {}, 1000),
        ({"total_size": 2000}, {"torch_dtype": "float32"}, 500),
        ({"total_size": 2000.0}, {"dtype": "torch.float32"}, 500),
        ({"total_size": 2000, "total_parameters": 7}, {}, 7),
    ],
)
def test_the_parameters_of_an_index(plan: Any, tmp_path: Path, metadata: dict[str, Any], dtype: dict[str, str], count: int) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **dtype}))
    for given in (".", "model.safetensors.index.json"):
        assert plan(given, "--gbps", "1")["parameters"] == count


def test_a_location_is_measured(plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.backend.save_duration.QUICK_BYTES", 1 << 20)
    found = plan("--params", "1k", "--at", str(tmp_path / "place"), "--ranks", "2")
    assert found["save_seconds"] > 0
    assert not [path for path in (tmp_path / "place").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is not a JSON object"),
        ("{", "cannot be read as JSON"),
        ("{}", "has no hidden_size"),
        ('{"hidden_size": -1, "num_hidden_layers": 1, "vocab_size": 1}', "has no hidden_size"),
        ('{"weight_map": {}}', "neither total_parameters nor total_size"),
        ('{"weight_map": {}, "metadata": {"total_size": "x"}}', "neither total_parameters nor total_size"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_says_too_little(tsck: Tsck, tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "model.json").write_text(content)
    found = tsck("plan", "model.json", "--gbps", "1")
    assert found.code != 0
    assert message in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gbps 1", "Give MODEL or --params"),
        ("--params 1B", "Give --gbps or --at"),
        ("--params 1B --gbps 1 --at x", "Give --gbps or --at"),
        ("--params many --gbps 1", "no number of parameters"),
        ("--params 1B --gbps 0", "0"),
        ("--params 1B --gbps 1 --every 0s", "every_seconds must be above 0"),
        ("--params 1B --gbps 1 --every 1s --stall 0s --days 10000", "are too many to plan"),
        ("--params 1B --gbps 1 --mtbf 0s", "mtbf_seconds must be above 0"),
    ],
)
def test_what_makes_no_sense(tsck: Tsck, arguments: str, message: str) -> None:
    found = tsck("plan", *arguments.split())
    assert found.code != 0
    assert message in found.err
