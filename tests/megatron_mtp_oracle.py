"""Megatron-Core's layers that predict further tokens, on CPU: `python megatron_mtp_oracle.py out.pt`.

Leaves the weights, the tokens, and the logits [S, B, V] of the next token and of each further one. A process of its own,
since Megatron asks for CUDA where nothing needs it, and must be told otherwise.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "mtp_num_layers": 2}
VOCAB, LENGTH = 61, 11


class _NoTracker:
    @contextlib.contextmanager
    def fork(self, name: str = "") -> Any:
        yield


def _model() -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_: tensor
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _NoTracker(), True
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        normalization="RMSNorm", layernorm_epsilon=1e-5, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, **SIZES,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config, layer, VOCAB, 64, parallel_output=False, share_embeddings_and_output_weights=False,
        position_embedding_type="rope", mtp_block_spec=get_gpt_mtp_block_spec(config, layer, False),
    )  # fmt: skip


def main() -> None:
    """Make a random model, run it once, save what there is to compare."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        model = _model()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
        tokens = torch.randint(VOCAB, (2, LENGTH + 1))
        logits: list[torch.Tensor] = []
        model.output_layer.register_forward_hook(
            lambda module, inputs, output: logits.append(output[0].detach().clone())
        )
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        model.eval()(tokens[:, :-1], torch.arange(LENGTH).expand(2, -1), mask, labels=tokens[:, 1:])
        weights = {name: tensor for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
        torch.save({"weights": weights, "tokens": tokens, "logits": [*logits[-1:], *logits[:-1]]}, sys.argv[1])


if __name__ == "__main__":
    main()
