"""A GPT of Megatron with the weights of a model of transformers, under torchrun: ``names_job FOLDER CHECKPOINT qwen2|mixtral TP EP``.

Loads the checkpoint, saves it again with Megatron's own strategy to ``FOLDER/again``, and writes its logits to ``FOLDER/logits.pt``.
"""

import sys
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

import tests.integrations.megatron.on_cpu  # noqa: F401
from tests.integrations.megatron.gpt import join, leave
from tests.integrations.rank_runs import say

HIDDEN, LAYERS, HEADS, GROUPS, INNER, LENGTH = 32, 3, 4, 2, 48, 16
EPSILON, BASE = 1e-6, 10000
VOCABULARY: Final = {"qwen2": 64, "mixtral": 61}
PADDED: Final = 64
"""The rows of Megatron's embedding."""
EXPERTS: Final = 4
vars(moe_utils).setdefault("te_general_gemm", None)  # without the Transformer Engine 0.16 asks for it, and has not defined it
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "qwen2": {"add_qkv_bias": True},
    "mixtral": {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_ffn_hidden_size": INNER,
    },
}


def model(kind: str, tensor: int, expert: int) -> GPTModel:
    """As the model of transformers is."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=INNER,
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        layernorm_epsilon=EPSILON,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **_KINDS[kind],
    )
    experts = EXPERTS if kind == "mixtral" else None
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        rotary_base=BASE,
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )


def main(folder: Path, checkpoint: str, kind: str, tensor: int, expert: int) -> None:
    join(tensor, 1, expert)
    torch.manual_seed(5)
    gpt = model(kind, tensor, expert)
    loaded = dist_checkpointing.load({"model": gpt.sharded_state_dict()}, checkpoint, strict="log_all")
    missing, unexpected = gpt.load_state_dict(loaded["model"], strict=False)
    assert not unexpected
    assert all(name.endswith("._extra_state") for name in missing), missing  # of Transformer Engine, which is not used here
    again = folder / "again"
    if dist.get_rank() == 0:
        again.mkdir()
    dist.barrier()
    dist_checkpointing.save({"model": gpt.sharded_state_dict(), "iteration": 3}, str(again))
    tokens = torch.arange(LENGTH)[None] * 7 % VOCABULARY[kind]
    mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    with torch.no_grad():
        logits = gpt(tokens, torch.arange(LENGTH)[None], mask)
    if dist.get_rank() == 0:
        torch.save((tokens, logits), folder / "logits.pt")
    say(tensors=len(loaded["model"]))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
