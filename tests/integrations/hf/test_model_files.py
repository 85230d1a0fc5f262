"""`tsck export --to hf`: a folder that transformers and peft load, from snapshots of their own training runs."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import peft
import pytest
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import tensorstore_ck as tsck
from tensorstore_ck.integrations import hf
from tensorstore_ck.integrations.exporting.try_model_folder import try_folder
from tensorstore_ck.integrations.filesystem import SnapshotFileSystem
from tensorstore_ck.integrations.hf import small_files
from tests.cli.conftest import Tsck
from tests.cli.conftest import tsck as tsck_command
from tests.integrations.hf import runs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")]  # peft

command = tsck_command
VOCABULARY = 20_000


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"word{number}": number for number in range(VOCABULARY)}
    splitting = Tokenizer(WordLevel(words, unk_token="word0"))
    splitting.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=splitting, unk_token="word0", pad_token="word1")


def _loaded(folder: Path) -> GPT2LMHeadModel:
    """The model in a folder, which has every weight."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert isinstance(model, GPT2LMHeadModel)
    return model


def _trained(folder: Path, store: tsck.Store, **more: Any) -> hf.Trainer:
    trainer = hf.Trainer(**{**runs.parts(folder / "out", max_steps=4, save_steps=2), **more}, store=store, ref=runs.REF)
    trainer.train()
    return trainer


class Finished(NamedTuple):
    """A run that has ended, with a tokenizer."""

    trainer: hf.Trainer
    store: tsck.Store


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("finished")
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache") as store:
        yield Finished(_trained(folder, store, processing_class=_tokenizer()), store)


def test_a_snapshot_of_a_run_is_a_folder_for_from_pretrained(tmp_path: Path, finished: Finished, command: Tsck) -> None:
    """The weights are tied. The files are those that transformers itself writes, and they are stored once."""
    trainer, store = finished
    sizes = [snapshot.new_bytes for snapshot in reversed(store.log(runs.REF))]
    tokenizer = len(small_files.model_files(trainer.model, trainer.processing_class)["tokenizer.json"])
    assert tokenizer > 300_000
    assert all(each < tokenizer / 4 for each in sizes[1:])
    trainer.save_model(str(tmp_path / "native"))
    result = command("export", runs.REF, "--to", "hf", "model", store=store.url)
    assert result.code == 0, result.err
    assert "note: tried: GPT2LMHeadModel.from_pretrained loads it, with every weight" in result.out
    model = _loaded(tmp_path / "model")
    runs.assert_equal(model.state_dict(), runs.weights(trainer))
    is_tied = model.lm_head.weight is model.transformer.wte.weight
    assert is_tied or transformers.__version__.startswith("5.3."), "5.3 ties no weights that a file has under both names"
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("word7 word9")["input_ids"] == [7, 9]
    for native in (tmp_path / "native").iterdir():
        if native.suffix == ".json":
            assert (tmp_path / "model" / native.name).read_bytes() == native.read_bytes()
    names = {each.name for each in (tmp_path / "native").iterdir()} - {"training_args.bin"}
    assert {each.name for each in (tmp_path / "model").iterdir()} == names
    document = command("export", f"{runs.REF}@2", "--to", "hf", "earlier", "--json", store=store.url).json
    assert document["format"] == "hf"
    assert document["notes"][0].startswith("tried: ")


def test_a_large_model_is_split(tmp_path: Path, finished: Finished, command: Tsck) -> None:
    result = command("export", runs.REF, "--to", "hf", "model", "--max-file-size", "2kB", store=finished.store.url)
    assert result.code == 0, result.err
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    runs.assert_equal(_loaded(tmp_path / "model").state_dict(), runs.weights(finished.trainer))


def test_a_run_that_was_resumed_from_a_snapshot_without_files(tmp_path: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(small_files, "capture", lambda *_: {})
        with pytest.raises(runs.Killed):
            runs.over_store(tmp_path / "out", store, kill_after=9).train()
    store.drain()
    with pytest.raises(tsck.NotFoundError, match=r"needs a config\.json, and the snapshot contains none"):
        tsck.export_snapshot(store, runs.REF, tmp_path / "model", format="hf")
    resumed = runs.over_store(tmp_path / "out", store)
    resumed.train(resume_from_checkpoint=True)
    tsck.export_snapshot(store, runs.REF, tmp_path / "model", format="hf")
    runs.assert_equal(_loaded(tmp_path / "model").state_dict(), runs.weights(resumed))
    resumed = runs.over_store(tmp_path / "out", store)
    resumed.train(resume_from_checkpoint=f"{runs.REF}@12")
    runs.assert_equal(runs.weights(resumed), _loaded(tmp_path / "model").state_dict())


def test_a_configuration_from_elsewhere(tmp_path: Path, store: tsck.Store, command: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    given = runs.parts(tmp_path / "out")
    given["model"].save_pretrained(tmp_path / "original")
    _tokenizer().save_pretrained(tmp_path / "original")
    store.put_snapshot({"model": given["model"].state_dict(), "step": 3}, ref="plain")
    options = ("export", "plain", "--to", "hf", "model")
    where = str(tmp_path / "store")
    assert command(*options, store=where).code == 25
    assert command(*options, "--config-from", "original", store=where).code == 0
    runs.assert_equal(_loaded(tmp_path / "model").state_dict(), given["model"].state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("word7")["input_ids"] == [7]
    # by its name on the hub, here from the user's cache
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = tmp_path / "hub" / "models--someone--small"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    (hub / "snapshots").mkdir()
    (tmp_path / "original").rename(hub / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tsck.export_snapshot(store, "plain", tmp_path / "named", format="hf", config_from="someone/small")
    runs.assert_equal(_loaded(tmp_path / "named").state_dict(), given["model"].state_dict())
    with pytest.raises(tsck.NotFoundError, match="someone/other: there is no such folder"):
        tsck.export_snapshot(store, "plain", tmp_path / "other", format="hf", config_from="someone/other")
    with pytest.raises(tsck.InvalidOptionError, match="for the format hf"):
        tsck.export_snapshot(store, "plain", tmp_path / "other", format="safetensors", config_from=tmp_path)


def test_a_folder_that_would_not_load_is_not_written(tmp_path: Path, store: tsck.Store) -> None:
    model = runs.parts(tmp_path / "out")["model"]
    files = hf.model_files(model)
    weights = model.state_dict()
    lacking = {name: tensor for name, tensor in weights.items() if "ln_f.bias" not in name}
    narrow = {**weights, "transformer.ln_f.bias": torch.zeros(3)}
    for state, what in (
        (lacking, r"it lacks transformer\.ln_f\.bias"),
        ({**weights, "ema.weight": torch.ones(3)}, r"it has unknown ema\.weight"),
        (narrow, r"shapes differ of transformer\.ln_f\.bias"),
        ({f"module.{name}": tensor for name, tensor in weights.items()}, "it lacks"),
    ):
        store.put_snapshot({"model": state, "model_files": files}, ref="x")
        with pytest.raises(tsck.MismatchError, match=what):
            tsck.export_snapshot(store, "x", tmp_path / "model", format="hf")
        assert not (tmp_path / "model").exists()
    tsck.export_snapshot(store, "x", tmp_path / "model", format="hf", strip_prefix="model.module.")
    runs.assert_equal(_loaded(tmp_path / "model").state_dict(), weights)
    store.put_snapshot({"model": weights, "model_files": {**files, "config.json": b"{"}}, ref="x")
    with pytest.raises(tsck.MismatchError, match=r"config\.json is not JSON"):
        tsck.export_snapshot(store, "x", tmp_path / "broken", format="hf")


def test_which_tensors_are_the_weights(tmp_path: Path, store: tsck.Store) -> None:
    model = runs.parts(tmp_path / "out")["model"]
    files, weights = {"model_files": hf.model_files(model)}, model.state_dict()
    ema = {"ema": {name: tensor + 1 for name, tensor in weights.items()}}
    store.put_snapshot({"net": weights, **ema, **files}, ref="x")
    with pytest.raises(tsck.MismatchError, match=r"several parts .* \(net, ema\)"):
        tsck.export_snapshot(store, "x", tmp_path / "model", format="hf")
    tsck.export_snapshot(store, "x", tmp_path / "model", format="hf", select=["ema.*"])
    runs.assert_equal(_loaded(tmp_path / "model").state_dict(), ema["ema"])
    store.put_snapshot({**weights, **files}, ref="flat")
    tsck.export_snapshot(store, "flat", tmp_path / "flat", format="hf")
    runs.assert_equal(_loaded(tmp_path / "flat").state_dict(), weights)
    training = tsck.TrainingState(model=model, extra=files)
    training.put(store, ref="own")
    tsck.export_snapshot(store, "own", tmp_path / "own", format="hf")
    runs.assert_equal(_loaded(tmp_path / "own").state_dict(), weights)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_names_no_code_to_run(tmp_path: Path, key: str) -> None:
    """transformers would fetch the kernel from that repository, and run it."""
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)).save_pretrained(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_bytes()), key: "evil/kernel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert try_folder(str(tmp_path), "x", config).startswith("tried: GPT2LMHeadModel.from_pretrained loads it")


def test_without_transformers_it_says_that_it_did_not_try(tmp_path: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = runs.parts(tmp_path / "out")["model"]
    files = hf.model_files(model)
    store.put_snapshot({"model": model.state_dict(), "model_files": files}, ref="x")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers.utils", None)
        report = tsck.export_snapshot(store, "x", tmp_path / "model", format="hf")
    assert report.notes == ("not tried: transformers is not installed",)
    _loaded(tmp_path / "model")
    for change, why in (
        ({"architectures": None}, "does not name the class"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "needs code of its own, which is not run"),
        ({"architectures": ["TinyModel"]}, f"transformers {transformers.__version__} has no TinyModel"),
    ):
        config = json.dumps({**json.loads(files["config.json"]), **change})
        store.put_snapshot({"model": model.state_dict(), "model_files": {"config.json": config}}, ref="x")
        report = tsck.export_snapshot(store, "x", tmp_path / "model", format="hf", overwrite=True)
        assert report.notes[0].startswith("not tried: ")
        assert why in report.notes[0]


def test_names_of_files_are_checked(tmp_path: Path, store: tsck.Store) -> None:
    for name in ("../config.json", "a/b.json", ".netrc", "model.safetensors", "run.sh", "x" * 300 + ".json"):
        store.put_snapshot({"model": {"a": torch.ones(2)}, "model_files": {"config.json": b"{}", name: b""}}, ref="x")
        with pytest.raises(tsck.UnsupportedValueError, match="no name of a file of a model"):
            tsck.export_snapshot(store, "x", tmp_path / "model", format="hf")
    assert [each.name for each in tmp_path.iterdir() if "model" in each.name] == []


def test_a_model_that_is_not_of_transformers_has_no_files(tmp_path: Path, store: tsck.Store) -> None:
    assert hf.model_files(torch.nn.Linear(2, 2)) == {}
    assert "tokenizer.json" in hf.model_files(torch.nn.Linear(2, 2), _tokenizer())


def test_files_that_cannot_be_made_do_not_end_a_run(tmp_path: Path, store: tsck.Store) -> None:
    class Broken(PreTrainedTokenizerFast):  # type: ignore[misc]
        def save_pretrained(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("no vocabulary")

    broken = Broken(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), unk_token="a", pad_token="a")
    with pytest.warns(UserWarning, match=r"will not contain .* \(RuntimeError: no vocabulary\)"):
        _trained(tmp_path, store, processing_class=broken)
    assert len(store.log(runs.REF)) == 2


# --- tsck:// ----------------------------------------------------------------------------------------------------------


def test_reading_over_fsspec(tmp_path: Path, finished: Finished) -> None:
    """What docs/trainers/transformers.md shows."""
    fsspec.register_implementation("tsck", SnapshotFileSystem, clobber=True)  # as the entry point does where the package is installed
    trainer, store = finished
    url = f"tsck://{runs.REF}@4/model.safetensors::{store.url}"
    with fsspec.open(url) as file:
        weights = safetensors.torch.load(file.read())
    runs.assert_equal(weights, runs.weights(trainer))
    model, report = GPT2LMHeadModel.from_pretrained(None, config=trainer.model.config, state_dict=weights, output_loading_info=True)
    assert not report["missing_keys"]
    runs.assert_equal(model.state_dict(), weights)
    files = fsspec.filesystem("tsck", store=store.url)
    assert [Path(name).name for name in files.ls(f"{runs.REF}@4", detail=False)][3:] == [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    ]
    files.get(f"{runs.REF}@4/", f"{tmp_path}/copied/", recursive=True)
    runs.assert_equal(_loaded(tmp_path / "copied").state_dict(), weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "copied")("word7")["input_ids"] == [7]
    cached = fsspec.open_local(f"simplecache::{url}", simplecache={"cache_storage": str(tmp_path / "cached")})
    with safetensors.safe_open(cached, framework="pt") as opened:
        assert set(opened.keys()) == weights.keys()
    for missing in ("config.yaml", "vocab.json"):
        with pytest.raises(FileNotFoundError):
            files.cat(f"{runs.REF}@4/{missing}")


# --- peft -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["ln_f"], use_dora=True, task_type="CAUSAL_LM"
        ),
        peft.IA3Config(target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    ],
    ids=["lora", "ia3"],
)
def test_an_adapter_is_a_folder_for_peft(tmp_path: Path, store: tsck.Store, config: peft.PeftConfig) -> None:
    """Names and configuration are those that peft itself writes."""
    runs.parts(tmp_path / "out")["model"].save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(GPT2LMHeadModel.from_pretrained(tmp_path / "base"), config)
    trainer = _trained(tmp_path, store, model=model)
    report = tsck.export_snapshot(store, runs.REF, tmp_path / "adapter", format="hf")
    assert report.notes[0].startswith("tried: PeftModel.from_pretrained loads it, with every weight")
    assert {each.name for each in report.files} == {"adapter_config.json", "adapter_model.safetensors"}
    trainer.model.save_pretrained(tmp_path / "native")
    assert (tmp_path / "adapter" / "adapter_config.json").read_bytes() == (tmp_path / "native" / "adapter_config.json").read_bytes()
    ours, native = (peft.load_peft_weights(str(tmp_path / name), device="cpu") for name in ("adapter", "native"))
    runs.assert_equal(ours, native)
    loaded = peft.PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    runs.assert_equal(loaded.state_dict(), runs.weights(trainer))


def test_an_adapter_whose_base_is_elsewhere_is_not_tried(tmp_path: Path, store: tsck.Store) -> None:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(runs.parts(tmp_path / "out")["model"], config)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "elsewhere")
    files = hf.model_files(model)
    store.put_snapshot({"model": model.state_dict(), "model_files": files}, ref="x")
    report = tsck.export_snapshot(store, "x", tmp_path / "adapter", format="hf")
    assert report.notes == (f"not tried: the base model {tmp_path / 'elsewhere'} is not on this machine",)
    del files["adapter_names.json"]
    store.put_snapshot({"model": model.state_dict(), "model_files": files}, ref="x")
    with pytest.raises(tsck.MismatchError, match="does not contain peft's names"):
        tsck.export_snapshot(store, "x", tmp_path / "other", format="hf")


def test_the_active_one_of_several_adapters(tmp_path: Path, store: tsck.Store) -> None:
    model = peft.get_peft_model(runs.parts(tmp_path / "out")["model"], peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True))
    model.set_adapter("second")
    store.put_snapshot({"model": model.state_dict(), "model_files": hf.model_files(model)}, ref="x")
    tsck.export_snapshot(store, "x", tmp_path / "adapter", format="hf")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())["r"] == 3
    found = peft.load_peft_weights(str(tmp_path / "adapter"), device="cpu")
    runs.assert_equal(found, peft.get_peft_model_state_dict(model, adapter_name="second"))
