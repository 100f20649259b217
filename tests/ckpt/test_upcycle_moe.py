"""A dense model becomes a mixture of experts that computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_derive_checkpoint import save_random_checkpoint

from mega_ckpt.store import Checkpoint
from mega_ckpt.upcycle_moe import upcycle_to_moe, upcycled_config
from mega_ckpt.verify import verify_checkpoint
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig

mega_eval = pytest.importorskip("mega_eval.model_loading", reason="the first forward is that of mega_eval's models")
TOKENS = torch.arange(12).view(2, 6)


def logits(path: Path) -> torch.Tensor:
    model = mega_eval.load_inference_model(path, dtype=torch.float64)
    positions = torch.arange(6)[None]
    return model.compute_logits(model(model.embed_inputs(TOKENS, positions), model.make_forward_context(positions)))


@pytest.mark.parametrize("changes", [{}, {"mlp_bias": True, "activation": "gelu", "norm": "layernorm"}])
@pytest.mark.parametrize(
    "sizes",
    [
        {"experts": 4, "top_k": 1},
        {"experts": 4, "top_k": 2},
        {"experts": 6, "top_k": 3, "expert_ffn": 8},
        {"experts": 8, "top_k": 4, "expert_ffn": 12},
    ],
)
def test_the_first_forward_is_the_dense_models(tmp_path: Path, changes: dict[str, Any], sizes: dict[str, int]) -> None:
    dense = save_random_checkpoint(tmp_path / "run", 1, torch.float64, **changes)
    upcycle_to_moe(dense, tmp_path / "moe", **sizes)
    made = Checkpoint.open_folder(tmp_path / "moe")
    assert verify_checkpoint(made.folder).ok
    assert made.model.moe is not None
    assert (made.model.moe.num_experts, made.model.moe.top_k) == (sizes["experts"], sizes["top_k"])
    assert made.step == 0
    torch.testing.assert_close(logits(tmp_path / "moe"), logits(dense), rtol=1e-10, atol=1e-10)


def test_experts_are_copies_or_slices_and_the_router_is_seeded(tmp_path: Path) -> None:
    dense = Checkpoint.open_folder(save_random_checkpoint(tmp_path / "run", 1))
    name = "weights/model.layers.1.mlp"
    for folder, seed, ffn in (("a", 1, 8), ("b", 1, 8), ("c", 2, 8), ("whole", 1, None)):
        upcycle_to_moe(dense.folder, tmp_path / folder, experts=6, top_k=3, expert_ffn=ffn, seed=seed)
    a, b, c, whole = (Checkpoint.open_folder(tmp_path / folder) for folder in ("a", "b", "c", "whole"))
    up, down = (dense.read_tensor(f"{name}.{part}_proj.weight") for part in ("up", "down"))
    assert torch.equal(a.read_tensor(f"{name}.experts.up_proj.weight")[4], up[8:16])
    assert torch.equal(a.read_tensor(f"{name}.experts.down_proj.weight")[5], down[:, 16:])
    assert torch.equal(whole.read_tensor(f"{name}.experts.down_proj.weight")[3], down)
    routers = [one.read_tensor(f"{name}.gate.weight") for one in (a, b, c)]
    assert torch.equal(routers[0], routers[1])
    assert not torch.equal(routers[0], routers[2])
    assert torch.equal(routers[0][:3], routers[0][0].expand(3, -1))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"experts": 4, "top_k": 2, "expert_ffn": 7}, "--expert-ffn 7 must divide the dense width"),
        ({"experts": 4, "top_k": 3, "expert_ffn": 8}, "--experts 4 must be a multiple of the 3 slices of a block"),
        ({"experts": 6, "top_k": 2, "expert_ffn": 8}, "--top-k 2 must be a multiple of"),
        ({"experts": 2, "top_k": 4}, "top_k = 4"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], says: str) -> None:
    dense = ModelConfig.parse(
        {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}
    )
    with pytest.raises(ConfigError) as error:
        upcycled_config(dense, **sizes)
    assert says in str(error.value)
    with pytest.raises(ConfigError, match="must be dense, but has experts"):
        upcycled_config(upcycled_config(dense, experts=2, top_k=1), experts=2, top_k=1)


def test_nothing_is_left_of_a_destination_that_exists(tmp_path: Path) -> None:
    dense = save_random_checkpoint(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match="exists already"):
        upcycle_to_moe(dense, tmp_path / "run", experts=2, top_k=1)
