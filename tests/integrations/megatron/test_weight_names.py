"""A model of transformers in Megatron's GPT, and back: equal logits there, equal bits after the way back."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

import tensorstore_ck as tsck
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.integrations.importing import import_checkpoint
from tests.effort import effort
from tests.integrations.rank_runs import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
JOB = "tests.integrations.megatron.names_job"
NAMES = Path(__file__).parents[3] / "examples" / "llama_names.toml"


def qwen2(folder: Path) -> Qwen2ForCausalLM:
    """The model that `names_job` has, with random weights; saved to a folder."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    found = Qwen2ForCausalLM(config)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found.save_pretrained(folder)
    return found


def test_a_model_of_transformers_in_megatron_and_back(tmp_path: Path) -> None:
    original = qwen2(tmp_path / "qwen2")
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        import_checkpoint(store, tmp_path / "qwen2", ref="qwen2", names=NAMES)
        export_snapshot(store, "qwen2", tmp_path / "megatron", format="megatron")
        for ranks in effort((2,), (1, 2)):
            folder = tmp_path / str(ranks)
            said = run_ranks(JOB, folder, str(tmp_path / "megatron"), str(ranks), ranks=ranks)
            assert [each["tensors"] > 20 for each in said] == [True] * ranks
            tokens, logits = torch.load(folder / "logits.pt")
            with torch.no_grad():
                expected = original(tokens).logits
            assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5), (logits - expected).abs().max()
            import_checkpoint(store, folder / "again", ref=f"again-{ranks}")
            export_snapshot(store, f"again-{ranks}", folder / "hf", format="hf", names=NAMES, config_from=tmp_path / "qwen2")
            found, held = load_file(folder / "hf" / "model.safetensors"), load_file(tmp_path / "qwen2" / "model.safetensors")
            assert found.keys() == held.keys()
            assert all(found[name].equal(each) for name, each in held.items())
