"""Weights of Hugging Face under the names of Megatron-core, and back: every bit, and what does not fit."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tensorstore_ck as ck
from tensorstore_ck.integrations.exporting import byte_routing, export_snapshot
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.integrations.weight_names import read_names
from tensorstore_ck.integrations.weight_names.states import convert_state
from tests.cli.conftest import Tsck, tsck
from tests.gc.stores import open_store
from tests.integrations.exporting.states import small_blocks

__all__ = ["tsck"]

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama_names.toml"
HEADS, GROUPS, HEAD, HIDDEN, LAYERS = 4, 2, 8, 32, 3


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ck.Store]:
    monkeypatch.setattr(byte_routing, "WINDOW_BYTES", 3000)  # windows end within layers and within rows
    monkeypatch.setattr(byte_routing, "BATCH_BYTES", 20000)
    with open_store(small_blocks()) as opened:
        yield opened


@pytest.fixture(params=["stacked", "numbered"])
def names(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "names.toml"
    layers = "decoder.layers." if request.param == "stacked" else "decoder.layers.{i}."
    path.write_text(EXAMPLE.read_text().replace('"decoder.layers.', f'"{layers}'))
    return path


def weights(*, bias: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    found = {"model.embed_tokens.weight": random(50, HIDDEN), "lm_head.weight": random(50, HIDDEN), "model.norm.weight": random(HIDDEN)}
    for layer in range(LAYERS):
        for name, rows in (("q", HEADS * HEAD), ("k", GROUPS * HEAD), ("v", GROUPS * HEAD)):
            found[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = random(rows, HIDDEN)
            if bias:
                found[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = random(rows)
        found[f"model.layers.{layer}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD)
        found[f"model.layers.{layer}.mlp.gate_proj.weight"] = random(48, HIDDEN)
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = random(48, HIDDEN)
        found[f"model.layers.{layer}.mlp.down_proj.weight"] = random(HIDDEN, 48)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = random(HIDDEN)
    return found


def merged(held: Mapping[str, torch.Tensor], layer: int) -> torch.Tensor:
    """linear_qkv.weight as Megatron Bridge's `merge_qkv_weights` makes it."""
    q, k, v = (held[f"model.layers.{layer}.self_attn.{name}_proj.weight"].view(-1, HEAD, HIDDEN) for name in "qkv")
    each, rows = HEADS // GROUPS, []
    for group in range(GROUPS):
        rows += [q[group * each : (group + 1) * each], k[group : group + 1], v[group : group + 1]]
    return torch.cat(rows).reshape(-1, HIDDEN)


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == each.dtype and found[name].equal(each) for name, each in expected.items()
    )


def test_there_and_back(store: ck.Store, names: Path, tmp_path: Path) -> None:
    held = weights()
    save_file(held, tmp_path / "model.safetensors")
    _, contents = import_checkpoint(store, tmp_path / "model.safetensors", ref="megatron", names=names)
    found = store.checkout("megatron")
    assert contents.tensors == len(found)
    for layer in range(LAYERS):
        if "decoder.layers.self_attention.linear_qkv.weight" in found:
            qkv, fc1 = (found[f"decoder.layers.{name}.weight"][layer] for name in ("self_attention.linear_qkv", "mlp.linear_fc1"))
        else:
            qkv, fc1 = (found[f"decoder.layers.{layer}.{name}.weight"] for name in ("self_attention.linear_qkv", "mlp.linear_fc1"))
        assert qkv.equal(merged(held, layer))
        assert fc1.equal(torch.cat([held[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    report = export_snapshot(store, "megatron", tmp_path / "back.safetensors", format="safetensors", names=names)
    assert same(load_file(tmp_path / "back.safetensors"), held)
    assert report.tensors == len(held)
    export_snapshot(store, "megatron", tmp_path / "megatron.safetensors", format="safetensors")
    _, contents = import_checkpoint(store, tmp_path / "megatron.safetensors", ref="hf", names=names)
    assert same(store.checkout("hf"), held)


def test_a_stored_model_of_hugging_face_as_a_folder_of_megatron_and_back(store: ck.Store, names: Path, tmp_path: Path) -> None:
    held = weights(bias=False)
    store.put_snapshot({"model": held, "step": 3}, ref="hf")
    export_snapshot(store, "hf", tmp_path / "folder", format="megatron", names=names, select=["model.*"], strip_prefix="model.")
    _, contents = import_checkpoint(store, tmp_path / "folder", ref="back", names=names)
    assert contents.left_out == ("common",)
    assert same(store.checkout("back"), held)


def test_what_is_no_tensor_is_left_out_and_reported(store: ck.Store, names: Path, tmp_path: Path) -> None:
    megatron, _ = convert_state(read_names(names), weights())
    store.put_snapshot({**megatron, "rng_state/shard_0_1": [3], "common": {"iteration": 7}}, ref="run")
    report = export_snapshot(store, "run", tmp_path / "out.safetensors", format="safetensors", names=names)
    assert report.left_out == dict.fromkeys(["rng_state/shard_0_1", "common.iteration"], "not a tensor")
    assert same(load_file(tmp_path / "out.safetensors"), weights())


def test_pieces_of_several_ranks(names: Path) -> None:
    held = weights()
    megatron, _ = convert_state(read_names(names), held)
    cut = {}
    for name, value in megatron.items():
        boxes = value.boxes if isinstance(value, ck.Boxes) else [ck.Box(value, tuple(value.shape), (0,) * value.dim())]
        whole = torch.empty(boxes[0].global_shape, dtype=torch.bfloat16)
        for box in boxes:
            whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.local.shape, strict=True))] = box.local
        axis = whole.dim() - 1 if "linear_proj" in name or "linear_fc2" in name else max(whole.dim() - 2, 0)
        offsets = [0] * whole.dim()
        pieces = []
        for piece in torch.split(whole, 5, axis):
            pieces.append(ck.Box(piece, tuple(whole.shape), tuple(offsets)))
            offsets[axis] += piece.shape[axis]
        cut[name] = ck.Boxes(pieces)
    with open_store(small_blocks()) as store:
        store.put_snapshot(convert_state(read_names(names), cut)[0], ref="run")
        assert same(store.checkout("run"), held)


def test_the_command(tsck: Tsck, names: Path) -> None:
    save_file(weights(), "model.safetensors")
    assert tsck("init", "ck").code == 0
    assert tsck("import", "model.safetensors", "--ref", "m", "--names", str(names)).code == 0
    assert tsck("export", "m", "out.safetensors", "--to", "safetensors", "--names", str(names)).code == 0
    assert same(load_file("out.safetensors"), weights())
    refused = tsck("import", "--history", "*.safetensors", "--step-from", "name", "--ref", "n", "--names", str(names))
    assert "--names is for a single snapshot" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names"), [("Llama", "stacked"), ("Qwen2", "numbered")], indirect=["names"])
@pytest.mark.filterwarnings("ignore")
def test_models_of_transformers(store: ck.Store, names: Path, tmp_path: Path, kind: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "model")
    import_checkpoint(store, tmp_path / "model", ref="run", names=names)
    report = export_snapshot(store, "run", tmp_path / "back", format="hf", names=names, config_from=tmp_path / "model")
    assert any(f"{kind}ForCausalLM.from_pretrained loads it, with every weight" in note for note in report.notes)
    assert same(load_file(tmp_path / "back" / "model.safetensors"), load_file(tmp_path / "model" / "model.safetensors"))


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.other.weight": (3,), "x": (2,)}, r"no name of Hugging Face for 2 of \d+ tensors \(model\.other\.weight, x\): add them"),
        ({"optimizer.exp_avg": (3,)}, r"leave the tensors out with --exclude"),
        ({"model.layers.1.self_attn.k_proj.weight": None}, r"model\.layers\.1\.self_attn\.k_proj\.weight is missing"),
        (
            {"model.layers.1.self_attn.k_proj.weight": (8, HIDDEN)},
            r"k_proj\.weight bfloat16 \[8, 32\], .* do not fit each other with 4 attention heads and 2",
        ),
        (
            {"model.layers.1.self_attn.k_proj.weight": (24, HIDDEN)},
            r"k_proj\.weight bfloat16 \[24, 32\], .* do not fit each other with 4 attention heads and 2",
        ),
        (
            {"model.layers.1.mlp.up_proj.weight": (50, HIDDEN)},
            r"gate_proj\.weight bfloat16 \[48, 32\], .*up_proj\.weight bfloat16 \[50, 32\] do not fit each other",
        ),
        ({"model.layers.1.mlp.up_proj.weight": ()}, r"does not fit decoder\.layers\.mlp\.linear_fc1\.weight: it has no rows"),
        ({"model.layers.1.mlp.down_proj.weight": (HIDDEN, 50)}, r"forms bfloat16 \[32, 48\] and bfloat16 \[32, 50\]"),
        ({"model.layers.1.mlp.down_proj.weight": None}, r"\{i\} = 1 is missing"),
    ],
)
def test_tensors_that_do_not_fit(store: ck.Store, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    held = weights()
    for name, shape in change.items():
        held.pop(name, None)
        if shape is not None:
            held[name] = torch.ones(shape).bfloat16()
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ck.MismatchError, match=said):
        import_checkpoint(store, tmp_path / "model.safetensors", ref="run", names=EXAMPLE)
    assert "run" not in store.branches()
    store.put_snapshot(held, ref="hf")
    with pytest.raises(ck.MismatchError, match=said):
        export_snapshot(store, "hf", tmp_path / "out", format="megatron", names=EXAMPLE)
    assert not (tmp_path / "out").exists()


def test_a_fused_tensor_of_other_heads(store: ck.Store, tmp_path: Path) -> None:
    store.put_snapshot({"decoder.layers.self_attention.linear_qkv.weight": torch.ones(2, 63, 8)}, ref="run")
    with pytest.raises(ck.MismatchError, match=r"does not fit decoder\.layers\.self_attention\.linear_qkv\.weight: 63 rows"):
        export_snapshot(store, "run", tmp_path / "out", format="safetensors", names=EXAMPLE)


def test_without_tensors(store: ck.Store, tmp_path: Path) -> None:
    store.put_snapshot({"step": 1}, ref="run")
    with pytest.raises(ck.MismatchError, match="there are no tensors"):
        export_snapshot(store, "run", tmp_path / "out", format="safetensors", names=EXAMPLE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "is no file of weight names"),
        ("heads = 3", r"it has 'heads'; it may have attention_heads, query_groups, vocab_size, names, vocabulary, qkv, gate_up"),
        ('[vocabulary]\n"a" = "b"', r"\[vocabulary\] needs vocab_size"),
        ("", "it has no names"),
        ("names = 3", r"\[names\] is no table"),
        ('[names]\n"a" = ["b", "c"]', r"'a' in \[names\] needs one name"),
        ('[gate_up]\n"a" = "b"', r"'a' in \[gate_up\] needs a list of 2 names: gate, up"),
        ('[gate_up]\n"a" = ["b", 3]', r"needs a list of 2 names"),
        ('[qkv]\n"a" = ["b", "c", "d"]', r"\[qkv\] needs attention_heads and query_groups"),
        ('attention_heads = 3\nquery_groups = 2\n[qkv]\n"a" = ["b", "c", "d"]', r"of which the second divides the first"),
        ('[names]\n"a.{i}" = "b"', r"'a\.\{i\}' in \[names\] has other variables than 'b'"),
        ('[gate_up]\n"a" = ["b.{i}", "c"]', r"has other variables"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "names.toml").write_text(text)
    with pytest.raises(ck.InputError, match=said):
        read_names(tmp_path / "names.toml")
    with pytest.raises(ck.NotFoundError, match="there is no file"):
        read_names(tmp_path / "other.toml")


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text('[names]\n"a" = "c"\n"b" = "c"')
    with pytest.raises(ck.MismatchError, match="does not fit c: two tensors get this name"):
        convert_state(read_names(tmp_path / "names.toml"), {"a": torch.ones(1), "b": torch.ones(1)})


def test_numbers_are_written_in_one_way(tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text('[names]\n"a" = "b.{i}"')
    assert convert_state(read_names(tmp_path / "names.toml"), {"b.0": torch.ones(1), "b.1": torch.ones(1)})[0].keys() == {"a"}
    with pytest.raises(ck.MismatchError, match=r"b\.01"):
        convert_state(read_names(tmp_path / "names.toml"), {"b.0": torch.ones(1), "b.01": torch.ones(1)})


# --- padded vocabularies, experts, and what Hugging Face fuses --------------------------------------------------------

VOCABULARY, PADDED = 61, 64


def test_padding_of_the_vocabulary_is_left_out(store: ck.Store, tmp_path: Path) -> None:
    """From Hugging Face there is none: Megatron loads fewer rows into its own."""
    path = tmp_path / "names.toml"
    path.write_text(f'vocab_size = {VOCABULARY}\n[vocabulary]\n"embedding.word_embeddings.weight" = "model.embed_tokens.weight"')
    padded = torch.randn(PADDED, HIDDEN).bfloat16()
    store.put_snapshot({"embedding.word_embeddings.weight": padded}, ref="megatron")
    export_snapshot(store, "megatron", tmp_path / "hf.safetensors", format="safetensors", names=path)
    assert same(load_file(tmp_path / "hf.safetensors"), {"model.embed_tokens.weight": padded[:VOCABULARY]})
    import_checkpoint(store, tmp_path / "hf.safetensors", ref="back", names=path)
    assert same(store.checkout("back"), {"embedding.word_embeddings.weight": padded[:VOCABULARY]})


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("embedding.word_embeddings.weight", 60, "60 rows are fewer than the vocab_size of 61"),
        ("model.embed_tokens.weight", 64, r"model\.embed_tokens\.weight float32 \[64, 32\] do not fit each other: vocab_size is 61"),
    ],
)
def test_another_vocabulary(store: ck.Store, tmp_path: Path, name: str, rows: int, said: str) -> None:
    path = tmp_path / "names.toml"
    path.write_text(f'vocab_size = {VOCABULARY}\n[vocabulary]\n"embedding.word_embeddings.weight" = "model.embed_tokens.weight"')
    store.put_snapshot({name: torch.ones(rows, HIDDEN)}, ref="run")
    with pytest.raises(ck.MismatchError, match=said):
        export_snapshot(store, "run", tmp_path / "out.safetensors", format="safetensors", names=path)


def test_experts_are_an_axis_of_their_own(store: ck.Store, tmp_path: Path) -> None:
    names = EXAMPLE.with_name("mixtral_names.toml")
    experts, inner = 4, 24
    held = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight": torch.randn(inner, HIDDEN)
        for layer in range(LAYERS)
        for expert in range(experts)
        for part in ("w1", "w3")
    }
    save_file(held, tmp_path / "model.safetensors")
    import_checkpoint(store, tmp_path / "model.safetensors", ref="megatron", names=names)
    fused = store.checkout("megatron")["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert fused.shape == (LAYERS, experts, 2 * inner, HIDDEN)
    gate, up = (held[f"model.layers.1.block_sparse_moe.experts.2.{part}.weight"] for part in ("w1", "w3"))
    assert fused[1, 2].equal(torch.cat([gate, up]))
    export_snapshot(store, "megatron", tmp_path / "back.safetensors", format="safetensors", names=names)
    assert same(load_file(tmp_path / "back.safetensors"), held)


def test_queries_keys_and_values_in_one_tensor_of_hugging_face(store: ck.Store, tmp_path: Path) -> None:
    """As Phi-3 has them: all queries, then all keys, then all values."""
    path = tmp_path / "names.toml"
    left, right = "decoder.layers.{i}.self_attention.linear_qkv.weight", "model.layers.{i}.self_attn.qkv_proj.weight"
    path.write_text(f'attention_heads = {HEADS}\nquery_groups = {GROUPS}\n[qkv]\n"{left}" = "{right}"')
    apart = weights()
    held = {
        f"model.layers.{layer}.self_attn.qkv_proj.weight": torch.cat(
            [apart[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
        )
        for layer in range(LAYERS)
    }
    save_file(held, tmp_path / "model.safetensors")
    import_checkpoint(store, tmp_path / "model.safetensors", ref="megatron", names=path)
    expected = {f"decoder.layers.{layer}.self_attention.linear_qkv.weight": merged(apart, layer) for layer in range(LAYERS)}
    assert same(store.checkout("megatron"), expected)
    export_snapshot(store, "megatron", tmp_path / "back.safetensors", format="safetensors", names=path)
    assert same(load_file(tmp_path / "back.safetensors"), held)
