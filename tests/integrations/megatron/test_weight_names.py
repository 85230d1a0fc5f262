"""A model of transformers in Megatron's GPT, and back: equal logits there, equal bits after the way back."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import tensorstore_ck as tsck
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.integrations.importing import import_checkpoint
from tests.effort import effort
from tests.integrations.rank_runs import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
JOB = "tests.integrations.megatron.names_job"
EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = {"qwen2": "llama_names.toml", "mixtral": "mixtral_names.toml"}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def saved(kind: str, folder: Path) -> PreTrainedModel:
    """The model that `names_job` has, with random weights; saved to a folder."""
    torch.manual_seed(0)
    if kind == "qwen2":
        found: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, **SHAPE))
    else:
        rope = {"rope_theta": 10000.0, "rope_type": "default"}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": rope}
        found = MixtralForCausalLM(MixtralConfig(vocab_size=61, sliding_window=None, **experts, **SHAPE))
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found.save_pretrained(folder)
    return found


@pytest.mark.parametrize(
    ("kind", "ranks", "tensor", "expert"),
    effort(
        [("qwen2", 2, 2, 1), ("mixtral", 2, 1, 2)], [("qwen2", 1, 1, 1), ("qwen2", 2, 2, 1), ("mixtral", 1, 1, 1), ("mixtral", 2, 1, 2)]
    ),
)
def test_a_model_of_transformers_in_megatron_and_back(tmp_path: Path, kind: str, ranks: int, tensor: int, expert: int) -> None:
    """Mixtral's vocabulary is padded in Megatron, and its experts are spread over the ranks."""
    original, names = saved(kind, tmp_path / "hf"), tmp_path / "names.toml"
    of_local = "decoder.layers.mlp.linear_fc1.layer_norm_weight"  # without the Transformer Engine, as the example says
    names.write_text((EXAMPLES / NAMES[kind]).read_text().replace("decoder.layers.pre_mlp_layernorm.weight", of_local))
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        import_checkpoint(store, tmp_path / "hf", ref="hf", names=names)
        export_snapshot(store, "hf", tmp_path / "megatron", format="megatron")
        folder = tmp_path / "job"
        said = run_ranks(JOB, folder, str(tmp_path / "megatron"), kind, str(tensor), str(expert), ranks=ranks)
        assert [each["tensors"] > 20 for each in said] == [True] * ranks
        tokens, logits = torch.load(folder / "logits.pt")
        with torch.no_grad():
            expected = original(tokens).logits
        logits = logits[..., : expected.shape[-1]]
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5), (logits - expected).abs().max()
        import_checkpoint(store, folder / "again", ref="again")
        export_snapshot(store, "again", folder / "hf", format="hf", names=names, config_from=tmp_path / "hf")
        found, held = load_file(folder / "hf" / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
        assert found.keys() == held.keys()
        assert all(found[name].equal(each) for name, each in held.items())
