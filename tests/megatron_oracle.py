"""Megatron-Core on CPU, as the reference of its own formats: saves models, loads folders, tells their logits.

    python megatron_oracle.py jobs.json

Jobs, over four ranks with gloo:

    {"do": "save", "args": {...}, "tp": 2, "pp": 2, "ep": 1, "vp": 1, "folder": ..., "legacy": ...}
    {"do": "train", "args": {...}, "tp": 2, "pp": 2, "ep": 1, "bf16": false, "sharding": null, "folder": ..., "memory": ...}
    {"do": "load", "folder": ..., "tp": 1}        leaves what it makes of `tokens` in <folder>.pt: "logits", those of
                                                  "further" tokens, and with tp 1 what their "loss" adds to the main one
    {"do": "bert", "folder": ..., "samples": ...}  leaves the losses of a BERT on them in <folder>.pt: "lm" [B, S], "pairs"
    {"do": "t5", "folder": ..., "samples": ...}  leaves the losses [B, S] of a T5 on them in <folder>.pt, and its weights
    {"do": "load legacy", "folder": ..., "tp": 2, "pp": 2, "like": a torch_dist folder}

A process by itself: Megatron's writer starts processes, which those of the tests' fork server may not.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

WORLD = 4
BASE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 4,
    "group_query_attention": False, "kv_channels": 8, "normalization": "RMSNorm", "norm_epsilon": 1e-5, "swiglu": True,
    "openai_gelu": False, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False, "num_experts": None,
    "padded_vocab_size": 64, "vocab_size": 64, "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "rotary_percent": 1.0,
    "rotary_base": 10000, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "moe_router_pre_softmax": False, "multi_latent_attention": False, "quick_geglu": False,
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "softmax_type": "vanilla", "window_size": None,
    "window_attn_skip_freq": None, "rotary_interleaved": False, "layernorm_zero_centered_gamma": False,
    "mtp_num_layers": None, "squared_relu": False, "is_hybrid_model": False, "attention_output_gate": False,
}  # fmt: skip
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": None,
    "moe_layer_freq": 1, "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": 2, "moe_router_group_topk": None,
}  # fmt: skip
ADAM = {"lr": 0.01, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}


def run(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Do them in a process of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, __file__, str(folder / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (2, 17), generator=torch.Generator().manual_seed(7))


class _NoTracker:
    @contextlib.contextmanager
    def fork(self, name: str = "") -> Any:
        yield


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU, and says that it is there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        out = function(*args, **kwargs)
        return out.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and isinstance(out, str) else out


class _LayerNorm(torch.autograd.Function):
    """What Megatron's own layer norm, which adds one to weights by itself, asks of apex."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> Any:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def _prepare() -> None:
    """What Megatron asks of CUDA although nothing here needs it."""
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_: tensor
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _NoTracker(), True
    moe_utils.te_general_gemm = None
    multi_latent_attention.TELinear = multi_latent_attention.TEColumnParallelLinear = _Attention  # any class
    fused_layer_norm.FusedLayerNormAffineFunction, fused_layer_norm.HAVE_FUSED_LAYER_NORM = _LayerNorm, True
    torch._dynamo.config.disable = True
    filesystem_async._process_memory = lambda: 0  # asks for psutil
    filesystem_async._results_queue = queue.Queue()  # else of a process of its own
    _prepare_mamba()


def _prepare_mamba() -> None:
    """What Megatron's Mamba-2 asks of packages that need a GPU, and of one that only gives tensors other shapes."""
    sys.modules["megatron.core.inference.contexts.attention_context.triton.tensor_ops"] = MagicMock()  # asks for triton
    from megatron.core.ssm import mamba_block, mamba_context_parallel, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class Norm(torch.nn.Module):
        """A gate, then a norm of each group by itself."""

        def __init__(self, width: int, eps: float, group_size: int, **_: Any) -> None:
            super().__init__()
            self.weight, self.eps, self.group_size = torch.nn.Parameter(torch.ones(width)), eps, group_size

        def forward(self, x: Any, z: Any) -> Any:
            y = (x * torch.nn.functional.silu(z)).unflatten(-1, (-1, self.group_size))
            return self.weight * (y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            return make_sharded_tensors_for_checkpoint(self.state_dict(), prefix, {"weight": 0}, sharded_offsets)

    shapes = {
        "l b d -> b l d": lambda x: x.transpose(0, 1), "b l d -> l b d": lambda x: x.transpose(0, 1),
        "b l d -> b d l": lambda x: x.transpose(1, 2), "b d l -> b l d": lambda x: x.transpose(1, 2),
        "b l (h p) -> b l h p": lambda x, p: x.unflatten(-1, (-1, p)), "b l (g n) -> b l g n": lambda x, n: x.unflatten(-1, (-1, n)),
        "b l h p -> b l (h p)": lambda x: x.flatten(2), "b l h p -> l b (h p)": lambda x: x.flatten(2).transpose(0, 1),
    }  # fmt: skip
    mamba_mixer.rearrange = lambda x, pattern, **sizes: shapes[pattern](x, **sizes)
    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
    mamba_mixer.mamba_chunk_scan_combined, mamba_mixer.ExtendedRMSNorm = _scan, Norm
    mamba_block.TENorm = WrappedTorchNorm


def _scan(x: Any, dt: Any, a: Any, b: Any, c: Any, chunk: int, *, D: Any, dt_bias: Any, **_: Any) -> Any:
    """The recurrence of Mamba-2, a token after the other: x [B, S, H, P], dt [B, S, H], b and c [B, S, G, N]."""
    step = torch.nn.functional.softplus(dt + dt_bias)
    b, c = (one.repeat_interleave(x.shape[2] // one.shape[2], 2) for one in (b, c))
    state, out = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1]), []
    for t in range(x.shape[1]):
        decay = torch.exp(step[:, t] * a)[..., None, None]
        state = decay * state + (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1)


def _config(args: Namespace) -> Any:
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    function = torch.nn.functional.silu if args.swiglu else quick_gelu if args.quick_geglu else torch.nn.functional.gelu
    function = squared_relu if args.squared_relu else function
    experts = {} if not args.num_experts else {
        "num_moe_experts": args.num_experts, "moe_router_topk": args.moe_router_topk,
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size, "moe_token_dispatcher_type": "allgather",
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
        "moe_router_pre_softmax": args.moe_router_pre_softmax, "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": args.moe_layer_freq, "moe_router_score_function": args.moe_router_score_function,
        "moe_router_enable_expert_bias": args.moe_router_enable_expert_bias,
        "moe_router_num_groups": args.moe_router_num_groups, "moe_router_group_topk": args.moe_router_group_topk,
    }  # fmt: skip
    latent = {} if not args.multi_latent_attention else {
        "q_lora_rank": args.q_lora_rank, "kv_lora_rank": args.kv_lora_rank, "qk_head_dim": args.qk_head_dim,
        "qk_pos_emb_head_dim": args.qk_pos_emb_head_dim, "v_head_dim": args.v_head_dim, "rope_type": args.rope_type,
        "rotary_base": args.rotary_base, "mscale": args.mscale, "mscale_all_dim": args.mscale_all_dim,
        "rotary_scaling_factor": args.rotary_scaling_factor, "multi_latent_attention": True,
    }  # fmt: skip
    further = {} if not args.mtp_num_layers else {
        "mtp_num_layers": args.mtp_num_layers, "mtp_loss_scaling_factor": args.mtp_loss_scaling_factor,
    }  # fmt: skip
    kind = MLATransformerConfig if latent else TransformerConfig
    config = kind(
        num_layers=args.num_layers, hidden_size=args.hidden_size, ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads, num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels, normalization=args.normalization, layernorm_epsilon=args.norm_epsilon,
        layernorm_zero_centered_gamma=args.layernorm_zero_centered_gamma,
        gated_linear_unit=args.swiglu or args.quick_geglu, activation_func=function,
        activation_func_clamp_value=args.activation_func_clamp_value, glu_linear_offset=args.glu_linear_offset,
        softmax_type=args.softmax_type, window_size=args.window_size, window_attn_skip_freq=args.window_attn_skip_freq,
        rotary_interleaved=args.rotary_interleaved,
        add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias, qk_layernorm=args.qk_layernorm,
        attention_output_gate=args.attention_output_gate,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp, expert_model_parallel_size=args.ep,
        virtual_pipeline_model_parallel_size=args.vp if args.vp > 1 else None,
        **experts, **latent, **further, **({} if not args.is_hybrid_model else {
            "mamba_state_dim": args.mamba_state_dim, "mamba_head_dim": args.mamba_head_dim, "is_hybrid_model": True,
            "mamba_num_groups": args.mamba_num_groups, "mamba_num_heads": args.mamba_num_heads, "use_mamba_mem_eff_path": False,
        }),
    )  # fmt: skip
    if args.position_embedding_type == "yarn":  # as Megatron-LM does, by hand
        names = "original_max_position_embeddings beta_fast beta_slow correction_range_round_to_int"
        config.__dict__.update({f"yarn_{name}": getattr(args, f"yarn_{name}") for name in names.split()})
        given = (args.rotary_scaling_factor, args.mscale, args.mscale_all_dim)
        config.yarn_rotary_scaling_factor, config.yarn_mscale, config.yarn_mscale_all_dim = given
    return config


class _Attention(torch.nn.Module):
    """What latent attention asks of an attention; Megatron's own takes no heads whose values have another size."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [S, B, H, d] -> [B, H, S, d]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def _form_groups(args: Namespace) -> None:
    """Megatron's groups for a layout, where the last job had another: each has threads, which stay until it is destroyed."""
    from megatron.core import parallel_state

    sizes = (args.tp, args.pp, args.vp if args.vp > 1 else None, args.ep)
    if parallel_state.model_parallel_is_initialized():
        of = (
            parallel_state.get_tensor_model_parallel_world_size, parallel_state.get_pipeline_model_parallel_world_size,
            parallel_state.get_virtual_pipeline_model_parallel_world_size,
            parallel_state.get_expert_model_parallel_world_size,
        )  # fmt: skip
        if sizes == tuple(size() for size in of):
            return
        parallel_state.destroy_model_parallel()
        for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
    tp, pp, vp, ep = sizes
    parallel_state.initialize_model_parallel(tp, pp, vp, expert_model_parallel_size=ep)


def _models(args: Namespace) -> list[Any]:
    """The chunks of this rank."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.models import backends
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norm = FusedLayerNorm if args.layernorm_zero_centered_gamma else WrappedTorchNorm
    backends.LNImpl = transformer_block.LayerNormImpl = norm
    _form_groups(args)
    if args.is_hybrid_model:
        return [_hybrid(args)]
    if getattr(args, "decoder_num_layers", None) is not None:
        return [_t5(args)]
    if getattr(args, "bert_binary_head", None) is not None:
        return [_bert(args)]
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts,
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
        multi_latent_attention=args.multi_latent_attention,
    )
    if args.num_experts and args.moe_layer_freq != 1:
        spec = get_gpt_decoder_block_spec(_config(args), use_transformer_engine=False, normalization=args.normalization)
    if args.multi_latent_attention:
        spec.submodules.self_attention.submodules.core_attention = _Attention
    out = []
    for stage in range(args.vp):
        places = {"vp_stage": stage} if args.vp > 1 else {}
        out.append(
            GPTModel(
                _config(args), spec, args.padded_vocab_size, args.max_position_embeddings, parallel_output=False,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=args.vp == 1, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=args.vp == 1, vp_stage=stage),
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
                rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling,
                rope_scaling_factor=args.rope_scaling_factor,
                mtp_block_spec=get_gpt_mtp_block_spec(_config(args), spec, use_transformer_engine=False, **places), **places,
            ).eval()
        )  # fmt: skip
    return out


def _hybrid(args: Namespace) -> Any:
    """This rank's part of a model with layers of several kinds, of modules that need no GPU."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    def halves(experts: int | None) -> tuple[Any, Any]:
        whole = get_gpt_layer_local_spec(num_experts=experts, normalization=args.normalization).submodules
        attention = TransformerLayerSubmodules(
            input_layernorm=whole.input_layernorm, self_attention=whole.self_attention, self_attn_bda=whole.self_attn_bda,
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
        )  # fmt: skip
        feed = TransformerLayerSubmodules(
            pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda,
            sharded_state_dict_keys_map={} if experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        )  # fmt: skip
        return attention, feed

    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )  # fmt: skip
    (attention, mlp), experts = halves(None), halves(args.num_experts)[1] if args.num_experts else IdentityOp
    stack = MambaStackSubmodules(
        ModuleSpec(MambaLayer, submodules=mamba), ModuleSpec(TransformerLayer, submodules=attention),
        ModuleSpec(MLPLayer, submodules=mlp), ModuleSpec(TransformerLayer, submodules=experts),
    )  # fmt: skip
    return MambaModel(
        _config(args), ModuleSpec(MambaStack, submodules=stack), args.padded_vocab_size, args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        hybrid_override_pattern=args.hybrid_override_pattern, parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent, rotary_base=args.rotary_base,
    ).eval()  # fmt: skip


def _bert(args: Namespace) -> Any:
    """This rank's part of a BERT."""
    from megatron.core import parallel_state
    from megatron.core.models.bert import bert_layer_specs, bert_lm_head
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec, bert_lm_head.LNImpl = bert_layer_specs.bert_layer_local_spec, WrappedTorchNorm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = WrappedTorchNorm
    return BertModel(
        _config(args), 2 if args.bert_binary_head else 0, spec, args.padded_vocab_size, args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, parallel_output=False,
        add_binary_head=args.bert_binary_head,
    ).eval()  # fmt: skip


def _t5(args: Namespace) -> Any:
    """This rank's part of a T5."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    t5_spec.LNImpl = WrappedTorchNorm
    makers = t5_spec.encoder_model_with_local_spec, t5_spec.decoder_model_with_local_spec
    layers = args.encoder_num_layers, args.decoder_num_layers
    configs = [_config(Namespace(**{**vars(args), "num_layers": count})) for count in layers]
    specs = [
        TransformerBlockSubmodules([make()] * count, layer_norm=WrappedTorchNorm)
        for make, count in zip(makers, layers, strict=True)
    ]
    return T5Model(
        configs[1], configs[0], *specs, args.padded_vocab_size, args.max_position_embeddings, parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
    ).eval()  # fmt: skip


def _losses_of_t5(job: dict[str, Any]) -> None:
    """Where there are samples; none of a T5 with relative positions, which need Transformer Engine's attention."""
    (model,), _, state = _loaded(Path(job["folder"]), 1, 1)
    model.load_state_dict(state["model"])
    found = {"weights": dict(model.named_parameters()), "losses": None}
    if job["samples"]:
        samples = torch.load(job["samples"])
        seen, read = samples["seen"], samples["read"]
        later = torch.ones(read.shape[1], read.shape[1], dtype=torch.bool).triu(1)
        masks = _hidden(seen, seen), _hidden(read, read) | later, _hidden(read, seen)
        with torch.no_grad():
            found["losses"] = model(samples["encoder"], samples["decoder"], *masks, lm_labels=samples["labels"])
    if dist.get_rank() == 0:
        torch.save(found, Path(job["folder"]).with_suffix(".pt"))


def _hidden(queries: Any, keys: Any) -> Any:
    """As Megatron's data sets have it, of bool [B, S] and [B, T] without padding: [B, 1, S, T], true where nothing is seen."""
    return ~(queries[:, None, :, None] & keys[:, None, None, :])


def _losses_of_bert(job: dict[str, Any]) -> None:
    (model,), _, state = _loaded(Path(job["folder"]), 1, 1)
    model.load_state_dict(state["model"])
    samples = torch.load(job["samples"])
    with torch.no_grad():
        lm, order = model(samples["text"], samples["padding_mask"], samples["types"], lm_labels=samples["labels"])
    if dist.get_rank() == 0:
        pairs = None if order is None else torch.nn.functional.cross_entropy(order.float(), samples["is_random"])
        torch.save({"lm": lm, "pairs": pairs}, Path(job["folder"]).with_suffix(".pt"))


def _randomise(models: list[Any], args: Namespace) -> None:
    """Weights that differ, but are the same on all ranks that hold the same ones."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(dist.get_rank() % (args.tp * args.pp * args.ep))
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                replicated = "norm" in name or "router" in name or name.endswith(("proj.bias", "fc2.bias"))
                shared = torch.Generator().manual_seed(11) if replicated or "embedding" in name else generator
                parameter.add_(torch.randn(parameter.shape, generator=shared), alpha=0.1)
            for module in model.modules():
                if getattr(module, "expert_bias", None) is not None:
                    module.expert_bias.normal_(generator=torch.Generator().manual_seed(3))
            if (
                args.pp > 1
                and not args.untie_embeddings_and_output_weights
                and (model.pre_process or model.post_process)
            ):
                weight = model.shared_embedding_or_output_weight()
                weight.normal_(
                    std=0.3, generator=torch.Generator().manual_seed(parallel_state.get_tensor_model_parallel_rank())
                )


def _save(job: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing

    tp, pp, ep, vp = (job.get(name, 1) for name in ("tp", "pp", "ep", "vp"))
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    args = Namespace(**job["args"], **sizes, tp=tp, pp=pp, ep=ep, vp=vp)
    models = _models(args)
    _randomise(models, args)
    names = [f"model{i}" for i in range(len(models))] if len(models) > 1 else ["model"]
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    folder = Path(job["folder"])
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    sharded = {name: _sharded(model) for name, model in zip(names, models, strict=True)}
    dist_checkpointing.save({**common, **sharded}, str(folder))
    if job.get("legacy"):
        _save_legacy(
            job, args, {**common, **{name: model.state_dict() for name, model in zip(names, models, strict=True)}}
        )


def _save_legacy(job: dict[str, Any], args: Namespace, state: dict[str, Any]) -> None:
    from megatron.core import parallel_state

    if parallel_state.get_expert_data_parallel_rank() if args.ep > 1 else parallel_state.get_data_parallel_rank():
        return
    place = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    place += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if args.pp > 1 else ""
    place += f"_{parallel_state.get_expert_model_parallel_rank():03d}" if args.ep > 1 else ""
    folder = Path(job["legacy"]) / "iter_0000007" / place
    folder.mkdir(parents=True)
    torch.save(state, folder / "model_optim_rng.pt")
    (Path(job["legacy"]) / "latest_checkpointed_iteration.txt").write_text("7")


def _trained(args: Namespace, *, bf16: bool, distributed: bool) -> tuple[Any, Any, Any]:
    """A chunk after three steps of Megatron's optimizer, that, and its schedule."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    torch.manual_seed(1)
    models = _models(args)
    _randomise(models, args)
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    (chunk,) = (DistributedDataParallel(one.config, buffers, one.bfloat16() if bf16 else one) for one in models)
    settings = OptimizerConfig(
        optimizer="adam", min_lr=0.0, clip_grad=0.0, bf16=bf16, use_distributed_optimizer=distributed,
        params_dtype=torch.bfloat16 if bf16 else torch.float32, **ADAM,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [chunk])
    decay = {"start_wd": ADAM["weight_decay"], "end_wd": ADAM["weight_decay"], "wd_incr_steps": 1}
    schedule = OptimizerParamScheduler(
        optimizer, 0.0, ADAM["lr"], 0.0, 0, 80, "constant", wd_incr_style="constant", **decay
    )
    for step in range(3):
        _step(chunk, optimizer, 1.0 + step)
        schedule.step(8)
    return chunk, optimizer, schedule


def _step(chunk: Any, optimizer: Any, factor: float) -> None:
    """A step with gradients that are the weights times `factor`."""
    for parameter in chunk.parameters():
        parameter.main_grad.copy_(parameter.detach()).mul_(factor)
    assert optimizer.step()[0]


def _train(job: dict[str, Any]) -> None:
    """Three steps and a checkpoint, in the form `sharding` of the distributed optimizer where it is given.

    What the plain optimizer has in memory then goes into files of all ranks, as if it were weights, to <memory>-<what>; and
    so do the main weights after one more step, with the weights for gradients.
    """
    from megatron.core import dist_checkpointing

    tp, pp, ep, bf16, sharding = (job[name] for name in ("tp", "pp", "ep", "bf16", "sharding"))
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    args = Namespace(**job["args"], **sizes, tp=tp, pp=pp, ep=ep, vp=1, consumed_train_samples=24)
    folder = Path(job["folder"])
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    chunk, optimizer, schedule = _trained(args, bf16=bf16, distributed=sharding is not None)
    metadata = {"distrib_optim_sharding_type": sharding} if sharding else {}
    sharded = {"model": _sharded(chunk.module)}
    sharded["optimizer"] = optimizer.sharded_state_dict(sharded["model"], metadata=metadata)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 3, "opt_param_scheduler": schedule.state_dict()}
    dist_checkpointing.save({**common, **sharded}, str(folder))
    if sharding:
        chunk, optimizer, _ = _trained(args, bf16=bf16, distributed=False)
    held = {}
    for one in optimizer.chained_optimizers:
        held |= one.optimizer.state
    of = {name: getattr(weight, "main_param", weight) for name, weight in chunk.module.named_parameters()}
    for what in ("exp_avg", "exp_avg_sq"):
        _save_as_weights(job, args, chunk.module, {name: held[main][what] for name, main in of.items()}, what)
    _save_as_weights(job, args, chunk.module, of, "main")
    _step(chunk, optimizer, 1.0)
    _save_as_weights(job, args, chunk.module, of, "after")


def _save_as_weights(job: dict[str, Any], args: Namespace, model: Any, tensors: dict[str, Any], what: str) -> None:
    state = {name: value for name, value in model.state_dict().items() if name not in tensors}
    found = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    _save_legacy({"legacy": f"{job['memory']}-{what}"}, args, {"args": args, "iteration": 3, "model": state | found})


def _load(job: dict[str, Any]) -> None:
    """Load with the defaults of Megatron, which are strict, and keep the logits."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    folder = Path(job["folder"])
    (model,), args, state = _loaded(folder, job.get("tp", 1), 1)
    model.load_state_dict(state["model"])
    ids = tokens(args.vocab_size)
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).tril().logical_not()
    found: list[Any] = []
    losses = [torch.zeros(())]

    def keep(hidden: Any, loss: Any) -> Any:
        losses.append(loss.sum())
        return hidden

    model.output_layer.register_forward_hook(
        lambda module, inputs, output: found.append(output[0].transpose(0, 1)[..., : args.vocab_size].clone())
    )  # before the loss writes over them
    with torch.no_grad(), patch.object(MTPLossAutoScaler, "apply", keep):
        model(ids, positions, mask, labels=ids.roll(-1, 1))
    if dist.get_rank() == 0:
        *further, logits = found
        torch.save({"logits": logits, "further": further, "loss": sum(losses)}, folder.with_suffix(".pt"))


def _loaded(folder: Path, tp: int, pp: int) -> tuple[list[Any], Namespace, dict[str, Any]]:
    from megatron.core import dist_checkpointing

    args = dist_checkpointing.load_common_state_dict(str(folder))["args"]
    args.tp, args.pp, args.ep, args.vp = tp, pp, 1, 1
    models = _models(args)
    return models, args, dist_checkpointing.load({"model": _sharded(models[0])}, str(folder))


def _sharded(model: Any) -> dict[str, Any]:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    found: dict[str, Any] = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
    return found


def _load_legacy(job: dict[str, Any]) -> None:
    """Every rank's file into the modules of that rank, strictly: what they hold then is what `like` gives them."""
    from megatron.core import parallel_state

    (model,), args, state = _loaded(Path(job["like"]), job["tp"], job["pp"])
    model.load_state_dict(state["model"])
    expected = {name: tensor.clone() for name, tensor in model.named_parameters()}
    place = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    place += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if args.pp > 1 else ""
    found = torch.load(Path(job["folder"]) / place / "model_optim_rng.pt", weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(found["model"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def _rank(rank: int, jobs: list[dict[str, Any]], store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for job in jobs:
        with _OnCpu():
            {
                "save": _save,
                "train": _train,
                "load": _load,
                "bert": _losses_of_bert,
                "t5": _losses_of_t5,
                "load legacy": _load_legacy,
            }[job["do"]](job)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        work = json.loads(Path(sys.argv[1]).read_text())
        torch.set_num_threads(1)
        _prepare()  # before the ranks are forked, which so share these imports of many seconds
        torch.multiprocessing.start_processes(_rank, (work, f"{scratch}/store"), WORLD, start_method="fork")
