"""Reduction of a run to a tiny model of the same kind.

The rule: every option of the model is kept; only sizes change. The tiny model has one layer of each kind of the model's
layers, in their order, repeated until each pipeline stage has one. At most 8 heads, with as many key/value heads as before
or fewer; at most 8 experts, of which a token uses at most 3; widths of tens of elements; a vocabulary of a prime number of
tokens, so that tensor ranks pad it; windows, chunks and retrieved texts of a few tokens. Weights start ten times larger
than usual, so that attention is not uniform and no gradient is too small to show an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mega_common.errors import ConfigError
from mega_common.layer_kinds import expand_layer_pattern
from mega_common.model_config import ModelConfig, MoeConfig, RopeConfig
from mega_common.vision_config import VisionConfig
from mega_trainer.config.objective_config import USED
from mega_trainer.config.run_config import RunConfig, flatten_settings

MOST_HEADS, MOST_EXPERTS, MOST_CHOICES = 8, 8, 3
HIDDEN, FEED_FORWARD, VOCABULARY = 32, 48, 61
EXPERT_WIDTH, SHARED_EXPERT_WIDTH, LATENT_WIDTH = 24, 16, 20
WINDOW, CHUNK, CONVOLUTION = 5, 5, 4
LENGTH = 32  # tokens of a sample
INIT_STD = 0.2
HEAD_SIZES = (4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
MOST_SIZE = 4  # largest size in an extension's options
COUNTS = ("heads", "groups", "experts")  # ends of the names of options that are counts, not sizes


@dataclass(frozen=True)
class TinyModelRun:
    """Run reduced to a tiny model.

    Attributes:
        config: the run itself.
        unverified: sentences that name what of the run a verification leaves out.
    """

    config: RunConfig
    unverified: tuple[str, ...]

    @classmethod
    def from_run(cls, config: RunConfig) -> TinyModelRun:
        """Return a run reduced to a tiny model with the same kinds of layers.

        Raises:
            ConfigError: when its model is a module of the transformers library.
        """
        if config.model.transformers is not None:
            raise ConfigError(
                "mega verify requires a model of mega, found model.implementation = transformers",
                hint="remove model.implementation, if the model's family is supported",
            )
        return cls(config, tuple(_list_unverified(config)))

    @property
    def name(self) -> str:
        """Kinds of the model's layers, such as `attention+mlp, attention+moe`."""
        kinds = ("+".join(half for half in kind if half) for kind in self.config.model.layer_kinds)
        return ", ".join(dict.fromkeys(kinds))

    @property
    def num_distinct_layers(self) -> int:
        """Number of layers of the tiny model without a pipeline."""
        return max(2, len(_find_source_layers(self.config.model)))

    def model_fields(self, layers: int) -> dict[str, Any]:
        """Return the fields of the tiny `ModelConfig` with at least this number of layers."""
        layers += self.config.model.shared_kv_layers and 3  # the last stage has up to four that share keys and values
        layers += self.config.model.has_shortcuts and layers % 2  # pairs, of which the second adds experts' output
        fields = shrink_model_fields(self.config.model, max(layers, self.num_distinct_layers))
        for section, blocks in self._extension_options.items():
            fields[section] = {name: _shrink_options(options) for name, options in blocks.items()}
        return fields

    @property
    def _extension_options(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Options of the blocks that extensions add, with defaults, by section of the model and name."""
        return {
            section: {
                name: self.config.registry.entries(section)[name].options.parse(block.options).model_dump(mode="json")
                for name, block in getattr(self.config.model, section).items()
            }
            for section in ("mixers", "feed_forwards")
        }

    def describe_changes(self) -> list[str]:
        """Return the changed settings of the model, such as `hidden_size 4096 -> 32`."""
        model = self.config.model
        before = flatten_settings({**model.model_dump(mode="json"), **self._extension_options})
        after = flatten_settings(self.model_fields(0))
        return [
            f"{path} {before.get(path)} -> {value}"
            for path, value in sorted(after.items())
            if before.get(path) != value and value not in (None, {}) and path != "layers"
        ]

    def case_fields(self) -> dict[str, Any]:
        """Return the fields of a `LayoutCase` that the run decides: data length, optimizer, frozen tensors and adapter."""
        config = self.config
        optimizer = config.optimizer.model_dump(
            mode="json", exclude={"name", "clip_grad", "eps", "decoupled_lr", "lr_factors", "lr", "offload"}
        )
        sections: dict[str, Any] = {"optimizer": optimizer}
        if config.extensions:
            sections["extensions"] = list(config.extensions)
        if config.kernels.functions:
            sections["kernels"] = {"functions": list(config.kernels.functions)}
        if config.objective.kind not in USED:  # of an extension
            sections["objective"] = config.objective.model_dump(mode="json", exclude_unset=True)
        return {
            "length": LENGTH, "optimizer": config.optimizer.name, "decoupled_lr": config.optimizer.decoupled_lr,
            "lr_factors": dict(config.optimizer.lr_factors), "freeze": _without_layer_numbers(config.train.freeze),
            "lora": self._shrink_lora(), "closed": config.model.causal, "sections": sections,
        }  # fmt: skip

    def _shrink_lora(self) -> dict[str, Any] | None:
        lora = self.config.lora
        if lora is None:
            return None
        fields = lora.model_dump(mode="json", exclude_unset=True, exclude={"quantize", "init_from", "ranks"})
        return {**fields, "rank": min(lora.rank, 4)}


def list_chunked_mixers(config: RunConfig) -> list[str]:
    """Return the names of the recurrent mixers of extensions with an option `chunk_size`: tokens computed at once."""
    entries = config.registry.entries("mixers")
    return [
        name
        for name, block in config.model.mixers.items()
        if block.declares and block.declares.recurrent and "chunk_size" in entries[name].options.model_fields
    ]


def _list_unverified(config: RunConfig) -> Iterator[str]:
    """Yield sentences about parts of a run that a verification does not run."""
    if config.model.score:
        yield "The score head of the reward model is replaced by a language-model head."
    if config.model.task_head is not None:
        yield "The task head of the model is replaced by a language-model head."
    if config.model.vision is not None and config.model.vision.module is not None:
        yield "The vision encoder is one of mega, not a module of transformers (model.vision.module)."
    if config.objective.kind in USED and config.objective.kind != "cross_entropy":
        yield f"The objective is next-token cross entropy, not {config.objective.kind}."
    if config.precision in ("fp8", "fp16"):
        yield f"The rounding of {config.precision} is left out: layouts are compared in fp64, precisions in bf16."
    recurrent = {name for name, block in config.model.mixers.items() if block.declares and block.declares.recurrent}
    if unchunked := sorted(recurrent - set(list_chunked_mixers(config))):
        yield (
            f"Gradients of the recurrent mixers {', '.join(unchunked)} are not compared token by token: they have no option "
            "chunk_size; generation compares their outputs."
        )
    if config.parallel.dispatch != "alltoall":
        yield f"Experts are dispatched by all-to-all, as {config.parallel.dispatch} requires GPUs."
    if config.lora is not None and config.lora.quantize:
        yield "The base weights of the adapter are not quantised."
    if len(_without_layer_numbers(config.train.freeze)) < len(config.train.freeze):
        yield "Patterns of train.freeze with layer numbers are left out, as the tiny model has other layers."
    yield "Data are random tokens at a constant learning rate: data reader, tokenizer, schedule and callbacks are left out."
    yield "All runs on CPUs: GPU kernels are left out (mega doctor examines them)."


def _without_layer_numbers(patterns: Iterable[str]) -> list[str]:
    return [pattern for pattern in patterns if not any(part.isdigit() for part in pattern.split("."))]


def _find_source_layers(model: ModelConfig) -> list[int]:
    """Return the first layer of each kind: mixer, feed-forward, window, rotary positions and shared keys."""
    if model.encoder is not None or model.retro is not None:
        return [0, model.num_layers - 1]
    found: dict[Any, int] = {}
    first = next(filter(model.has_shortcut, range(model.num_layers)), 0)  # the layer after it adds the experts' output
    for layer in (*range(first, model.num_layers), *range(first)):
        kind = model.get_layer_kind(layer)
        where = (
            (model.get_attention_window(layer), model.has_rotary_positions(layer)) if "attention" in kind.mixers else ()
        )
        sparsity = model.ffn_sparsity and model.ffn_sparsity[layer]
        found.setdefault((kind, where, model.shares_keys(layer), model.is_hash_layer(layer), sparsity), layer)
    return list(found.values())


def shrink_model_fields(model: ModelConfig, layers: int) -> dict[str, Any]:
    """Return the fields of a tiny `ModelConfig` of the same kind, with a number of layers."""
    fields = model.model_dump(mode="json", exclude_unset=True, exclude={"transformers"})
    fields |= {"vocab_size": VOCABULARY, "init_std": INIT_STD, "score": False, "task_head": None}
    fields |= _shrink_layers(model, layers, fields) | _shrink_attention(model)
    fields["max_position"] = LENGTH if model.position == "learned" else max(LENGTH, min(model.max_position, 64))
    if model.sliding_window is not None and not (model.vision and model.vision.bidirectional_prompt):
        fields["sliding_window"] = min(model.sliding_window, WINDOW)
    if model.per_layer_input_size:
        fields["per_layer_input_size"] = 6
    if model.per_layer_vocab_size:
        fields["per_layer_vocab_size"] = VOCABULARY - 5
    if model.shared_kv_ffn_hidden_size:
        fields["shared_kv_ffn_hidden_size"] = 2 * fields["ffn_hidden_size"]
    if model.no_rope_scaling is not None:
        fields["no_rope_scaling"] = [model.no_rope_scaling[0], CHUNK]
    if model.moe is not None:
        fields["moe"] = {**fields["moe"], **_shrink_experts(model.moe)}
        if model.layers is None and model.moe.layers is not None:
            fields["moe"]["layers"] = fields.pop("_moe_layers")
        if model.moe.hash_layers is not None:
            fields["moe"]["hash_layers"] = fields.pop("_hash_layers")
    for key in ("_moe_layers", "_hash_layers"):
        fields.pop(key, None)
    if model.vision is not None:
        fields["vision"] = _shrink_vision(model.vision)
    for section, shrunk in _shrink_sections(model).items():
        fields[section] = {**fields.get(section, {}), **shrunk}
    return fields


def _shrink_layers(model: ModelConfig, layers: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer kinds, and the lists of layers with an option, of `layers` layers."""
    sources, mtp = _find_source_layers(model), min(model.mtp_layers, 2)
    chosen = [sources[layer % len(sources)] for layer in range(layers)]
    chosen += [model.num_layers + index for index in range(mtp)]
    found: dict[str, Any] = {"num_layers": layers, "mtp_layers": mtp}
    if model.layers is not None:
        named = len(expand_layer_pattern(model.layers)) > model.num_layers
        found["layers"] = [
            "+".join(half for half in model.get_layer_kind(source) if half)
            for source in (chosen if named else chosen[:layers])
        ]
    if model.shared_kv_layers:
        found["shared_kv_layers"] = sum(map(model.shares_keys, sources))
    for key in ("full_attention_layers", "no_rope_layers"):
        if key in fields and fields[key] is not None:
            found[key] = [layer for layer, source in enumerate(chosen) if source in fields[key]]
    if model.ffn_sparsity:
        found["ffn_sparsity"] = [model.ffn_sparsity[source] for source in chosen]
    found["_hash_layers"] = [layer for layer, source in enumerate(chosen[:layers]) if model.is_hash_layer(source)]
    found["_moe_layers"] = [layer for layer, source in enumerate(chosen) if model.is_moe_layer(source)]
    if model.encoder is not None:
        found["encoder"] = {**fields["encoder"], "num_layers": layers // 2, "start_token": 0}
    if model.retro is not None:
        attending = list(range((layers - 1) // 3, layers, 1 + layers // 4))
        retro = {
            "chunk_length": 4,
            "neighbors": min(model.retro.neighbors, 2),
            "encoder_layers": 2,
            "layers": attending,
        }
        found["retro"] = {**fields["retro"], **retro}
    return found


def shrink_count(count: int, most: int = MOST_HEADS) -> int:
    """Return a count of at most `most`: itself, `most` for an even count, or a divisor or `most` - 1 for an odd one."""
    if count <= most or count % 2 == 0:
        return min(count, most)
    return max((divisor for divisor in range(3, most) if count % divisor == 0), default=most - 1)


def shrink_shared_head_count(heads: int, shared: int, tiny_heads: int) -> int:
    """Return the number of shared heads (key/value heads, groups) of `tiny_heads` heads: all, one, or some as before."""
    if shared in (1, heads):
        return tiny_heads if shared == heads else 1
    wanted = max(2, tiny_heads * shared // heads)
    return max(divisor for divisor in range(1, wanted + 1) if tiny_heads % divisor == 0)


def _shrink_attention(model: ModelConfig) -> dict[str, Any]:
    """Return head counts, head size, widths and rotary settings."""
    heads = shrink_count(model.num_attention_heads)
    found: dict[str, Any] = {"num_attention_heads": heads, "hidden_size": HIDDEN}
    found["ffn_hidden_size"] = FEED_FORWARD if FEED_FORWARD % heads == 0 else 8 * heads
    if model.num_kv_heads is not None:
        found["num_kv_heads"] = shrink_shared_head_count(model.num_attention_heads, model.num_kv_heads, heads)
    if model.mla is not None:
        rotated = 4
        found["mla"] = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": rotated, "v_head_dim": 10}
        found["mla"] |= {"q_lora_rank": None if model.mla.q_lora_rank is None else 20}
        if indexer := model.mla.indexer:
            sizes = {"num_heads": shrink_count(indexer.num_heads), "head_dim": 6, "top_k": 3}
            found["mla"]["indexer"] = {**indexer.model_dump(), **sizes}
        kept = ("norm_eps", "latent_norm", "scaled_latents")
        found["mla"] |= {name: getattr(model.mla, name) for name in kept}
    elif section := model.compressed:
        size, rotated = _choose_head_size(model, heads)
        sizes = {"q_lora_rank": 20, "window": 4, "output_rank": 6, "csa_rate": 2, "hca_rate": 3}
        found |= {"head_dim": size, "compressed": section.model_dump() | sizes}
        found["compressed"]["output_groups"] = math.gcd(heads, shrink_count(section.output_groups))
        if indexer := section.indexer:
            sizes = {"num_heads": shrink_count(indexer.num_heads), "head_dim": max(6, rotated), "top_k": 3}
            found["compressed"]["indexer"] = {**indexer.model_dump(), **sizes}
    else:
        size, rotated = _choose_head_size(model, heads)
        if model.head_dim is not None and model.head_dim * model.num_attention_heads != model.hidden_size:
            found |= {"head_dim": size, "hidden_size": HIDDEN if heads * size != HIDDEN else HIDDEN + 8}
        else:
            found |= {"hidden_size": heads * size} | ({"head_dim": size} if model.head_dim is not None else {})
    if full := model.full_attention:
        shared = shrink_shared_head_count(model.num_attention_heads, full.num_kv_heads, heads)
        wide = size if full.head_dim == model.query_key_head_dim else 2 * size
        found["full_attention"] = {**full.model_dump(), "head_dim": wide, "num_kv_heads": shared}
        if full.num_attention_heads not in (None, model.num_attention_heads):
            found["full_attention"]["num_attention_heads"] = 2 * heads
    if model.value_head_dim:
        found["value_head_dim"] = size + 2
    for key, rope in (("rope", model.rope), ("local_rope", model.local_rope)):
        if rope is not None and key in model.model_fields_set:
            found[key] = _shrink_rope(rope, rotated // 2)
    return found


def _choose_head_size(model: ModelConfig, heads: int) -> tuple[int, int]:
    """Return (head size, rotated elements): the smallest size that RoPE can rotate and that gives a width of tens."""
    for size in HEAD_SIZES:
        rotated = int(size * model.rope.fraction)
        pairs = 3 if model.rope.sections else 1
        even = not any(int(size * rope.fraction) % 2 for rope in (model.rope, model.local_rope) if rope)
        fits = model.position != "rope" or (even and rotated >= 2 * pairs)
        if fits and heads * size >= HIDDEN // 2:
            return size, rotated
    raise ConfigError(f"no tiny head size fits rope.fraction = {model.rope.fraction}")


def _shrink_rope(rope: RopeConfig, pairs: int) -> dict[str, Any]:
    """Return rotary settings for heads with `pairs` rotated pairs, whose scaling begins within a sample."""
    fields = rope.model_dump(mode="json", exclude_unset=True)
    if rope.original_max_position is not None:
        fields["original_max_position"] = LENGTH // 4
    if rope.sections is not None:
        fields["sections"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    for key in ("short_factor", "long_factor"):
        if factors := getattr(rope, key):
            fields[key] = [factors[index * len(factors) // pairs] for index in range(pairs)]
    return fields


def _shrink_experts(moe: MoeConfig) -> dict[str, Any]:
    experts = shrink_count(moe.num_experts, MOST_EXPERTS)
    groups = max(n for n in range(1, min(moe.groups, 4) + 1) if experts % n == 0)
    top_groups = max(1, groups * moe.top_groups // moe.groups)
    return {
        "num_experts": experts, "top_k": min(moe.top_k, MOST_CHOICES, experts // groups * top_groups), "groups": groups,
        "top_groups": top_groups, "ffn_hidden_size": EXPERT_WIDTH,
        "shared_ffn_hidden_size": SHARED_EXPERT_WIDTH if moe.shared_ffn_hidden_size else 0,
        "zero_experts": min(moe.zero_experts, experts // 2),
        "latent_size": None if moe.latent_size is None else LATENT_WIDTH,
    }  # fmt: skip


def _shrink_sections(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """Return the sizes of recurrent mixers and relative positions."""
    found: dict[str, dict[str, Any]] = {}
    if model.position == "relative":
        found["relative"] = {"buckets": 8, "max_distance": 12}
    if model.altup is not None:
        found["altup"] = {"laurel_rank": 3}
    if (mamba := model.mamba) is not None:
        heads = shrink_count(mamba.num_heads)
        found["mamba"] = {
            "num_heads": heads, "head_dim": 2, "state_size": 4, "chunk_size": CHUNK,
            "num_groups": shrink_shared_head_count(mamba.num_heads, mamba.num_groups, heads),
            "conv_kernel": min(mamba.conv_kernel, CONVOLUTION),
        }  # fmt: skip
    if (mamba1 := model.mamba1) is not None:
        found["mamba1"] = {
            "inner_size": shrink_count(mamba1.inner_size), "state_size": 3, "dt_rank": 2, "chunk_size": CHUNK,
            "conv_kernel": min(mamba1.conv_kernel, CONVOLUTION),
        }  # fmt: skip
    if (delta := model.delta) is not None:
        heads = shrink_count(delta.num_value_heads)
        found["delta"] = {
            "num_value_heads": heads, "key_head_dim": 3, "value_head_dim": 2, "chunk_size": CHUNK,
            "num_key_heads": shrink_shared_head_count(delta.num_value_heads, delta.num_key_heads, heads),
            "conv_kernel": min(delta.conv_kernel, CONVOLUTION),
        }  # fmt: skip
    if (kda := model.kda) is not None:
        found["kda"] = {
            "num_heads": shrink_count(kda.num_heads), "head_dim": 3, "chunk_size": CHUNK,
            "conv_kernel": min(kda.conv_kernel, CONVOLUTION),
        }  # fmt: skip
    if (lightning := model.lightning) is not None:
        found["lightning"] = {"num_heads": shrink_count(lightning.num_heads), "head_dim": 3, "chunk_size": CHUNK}
    return found


def _shrink_vision(vision: VisionConfig) -> dict[str, Any]:
    fields = vision.model_dump(mode="json", exclude_unset=True, exclude={"begin_token", "end_token", "module"})
    fields |= {
        "num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 20, "num_attention_heads": 2, "patch_size": 2,
        "image_size": 4 * min(vision.pool, 2), "pool": min(vision.pool, 2), "image_token": VOCABULARY - 1,
        "feature_layer": vision.feature_layer if vision.feature_layer in (-1, -2) else 1,
    }  # fmt: skip
    if vision.pinpoints is not None:
        fields["pinpoints"] = [[4, 8], [8, 4], [4, 4]]
    if vision.native is not None:
        fields |= {"hidden_size": 16, "image_size": 8}
        window = None if vision.native.window is None else 4 * vision.native.merge
        pixels = (2 * vision.native.merge) ** 2
        native = {"window": window, "full_layers": [1], "min_pixels": 4 * pixels, "max_pixels": 6 * pixels}
        # one layer, so that the first pipeline stage may have a single one
        native |= {"positions": min(vision.native.positions, 9), "deepstack": [0] if vision.native.deepstack else []}
        fields["native"] = {**fields["native"], **native}
    return fields


def _shrink_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return an extension's options with smaller whole numbers.

    Sizes are smaller than counts of heads, so that context ranks pass recurrent states rather than exchange heads.
    """
    return {
        key: shrink_count(value, MOST_HEADS if key.endswith(COUNTS) else MOST_SIZE)
        if isinstance(value, int) and not isinstance(value, bool)
        else value
        for key, value in options.items()
    }
