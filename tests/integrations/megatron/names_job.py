"""A GPT of Megatron with the weights of a model of transformers, under torchrun: ``names_job FOLDER CHECKPOINT TP``.

Loads the checkpoint, saves it again with Megatron's own strategy to ``FOLDER/again``, and writes its logits to ``FOLDER/logits.pt``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import tests.integrations.megatron.on_cpu  # noqa: F401
from tests.integrations.megatron.gpt import join, leave
from tests.integrations.rank_runs import say

VOCABULARY, HIDDEN, LAYERS, HEADS, GROUPS, INNER, LENGTH = 64, 32, 3, 4, 2, 48, 16
EPSILON, BASE = 1e-6, 10000


def model(tensor: int) -> GPTModel:
    """As Qwen2 is."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=INNER,
        tensor_model_parallel_size=tensor,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        layernorm_epsilon=EPSILON,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        rotary_base=BASE,
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )


def main(folder: Path, checkpoint: str, tensor: int) -> None:
    join(tensor, 1)
    torch.manual_seed(5)
    gpt = model(tensor)
    loaded = dist_checkpointing.load({"model": gpt.sharded_state_dict()}, checkpoint, strict="log_all")
    missing, unexpected = gpt.load_state_dict(loaded["model"], strict=False)
    assert not unexpected
    assert all(name.endswith("._extra_state") for name in missing), missing  # of Transformer Engine, which is not used here
    again = folder / "again"
    if dist.get_rank() == 0:
        again.mkdir()
    dist.barrier()
    dist_checkpointing.save({"model": gpt.sharded_state_dict(), "iteration": 3}, str(again))
    tokens = torch.arange(LENGTH)[None] * 7 % VOCABULARY
    mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    with torch.no_grad():
        logits = gpt(tokens, torch.arange(LENGTH)[None], mask)
    if dist.get_rank() == 0:
        torch.save((tokens, logits), folder / "logits.pt")
    say(tensors=len(loaded["model"]))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
