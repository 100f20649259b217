"""Adapters of every kind that PEFT saves: computed as PEFT computes them, or refused by the name of what is not supported."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_peft import MODELS, logits
from tiny_models import BASE

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_ckpt.formats.peft_tensor_changes import check_peft_options
from mega_ckpt.source import open_weight_source, open_weights_with_adapter
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_data.tokenizer import train_tokenizer
from mega_eval.model_loading import LoraAdapterSet, load_inference_model, load_tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

BASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"num_kv_heads": 2, "tie_embeddings": True}),
    "untied": ("llama", {"num_kv_heads": 2}),
    "biased": ("qwen2", {"num_kv_heads": 2, "qkv_bias": True, "tie_embeddings": True}),
    "gpt2": ("gpt2", MODELS["gpt2"]),
    "neox": ("gpt_neox", MODELS["gpt_neox"]),
    "phi3": ("phi3", {"num_kv_heads": 2}),
    "experts": ("qwen3_moe", MODELS["qwen3_moe"]),
}
TOKENS = torch.arange(24).view(2, 12) % 13


@dataclass(frozen=True)
class Case:
    """An adapter to save: base, PEFT's configuration, and the refusal that is expected, if any."""

    base: str
    options: dict[str, Any]
    kind: str = "LoraConfig"
    refused: str = ""


def lora(base: str = "tied", refused: str = "", **options: Any) -> Case:
    return Case(base, {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **options}, refused=refused)


CASES: Mapping[str, Case] = {
    "saved_embedding_tied": lora(modules_to_save=["embed_tokens"]),
    "saved_head_tied": lora(modules_to_save=["lm_head"]),
    "saved_both_tied": lora(modules_to_save=["embed_tokens", "lm_head"]),
    "saved_embedding_tied_together": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "saved_head_tied_together": lora(modules_to_save=["lm_head"], ensure_weight_tying=True),
    "saved_both": lora("untied", modules_to_save=["embed_tokens", "lm_head"]),
    "saved_norm": lora("untied", modules_to_save=["norm", "input_layernorm"]),
    "saved_mlp": lora("untied", modules_to_save=["mlp"]),
    "saved_mlp_fused": lora("phi3", target_modules=["o_proj"], modules_to_save=["mlp"]),
    "lora_embedding": lora("untied", target_modules=["embed_tokens"]),
    "lora_embedding_tied": lora(target_modules=["embed_tokens", "q_proj"]),
    "lora_embedding_tied_together": lora(target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True),
    "lora_both_tied_together": lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    "lora_embedding_dora": lora("untied", target_modules=["embed_tokens", "v_proj"], use_dora=True),
    "lora_head": lora("untied", target_modules=["lm_head", "q_proj"]),
    "lora_head_tied": lora(target_modules=["lm_head", "q_proj"]),
    "lora_head_dora": lora("untied", target_modules=["lm_head"], use_dora=True),
    "lora_head_only_rslora": lora("untied", target_modules=["lm_head"], use_rslora=True),
    "gpt2_embedding": lora("gpt2", target_modules=["wte", "c_attn", "c_proj"]),
    "gpt2_positions": lora("gpt2", target_modules=["wpe"]),
    "neox_embed_out": lora("neox", target_modules=["embed_out", "query_key_value"]),
    "tokens": lora(trainable_token_indices=[3, 5, 1]),
    "tokens_untied": lora("untied", trainable_token_indices={"embed_tokens": [3, 5, 1], "lm_head": [2, 3]}),
    "tokens_alone": Case("tied", {"token_indices": [4, 2]}, kind="TrainableTokensConfig"),
    "rslora": lora("untied", use_rslora=True, target_modules=["q_proj", "down_proj"]),
    "dora": lora("untied", use_dora=True, target_modules=["q_proj", "down_proj"]),
    "patterns": lora(
        "untied", target_modules=["q_proj", "down_proj", "lm_head"], rank_pattern={"layers.1.mlp.down_proj": 2, "lm_head": 3},
        alpha_pattern={"^model.layers.0.self_attn.q_proj": 3, "lm_head": 2},
    ),
    "bias_all": lora("biased", bias="all"),
    "bias_all_fused": lora("gpt2", target_modules=["c_attn"], bias="all"),
    "bias_all_neox": lora("neox", target_modules=["query_key_value"], bias="all"),
    "bias_lora_only": lora("biased", bias="lora_only"),
    "some_layers": lora(layers_to_transform=[1]),
    "regex": lora(target_modules=r".*layers\.0\.(self_attn\.(q|v)|mlp\.up)_proj"),
    "all_linear": lora(target_modules="all-linear", exclude_modules=["k_proj"]),
    "all_linear_fused": lora("phi3", target_modules="all-linear"),
    "all_linear_gpt2": lora("gpt2", target_modules="all-linear"),
    "parameters": lora("experts", target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    "parameters_of_a_linear": lora("untied", target_modules=[], target_parameters=["q_proj.weight"]),
    "parameters_of_a_router": lora("experts", target_modules=["q_proj"], target_parameters=["mlp.gate.weight"]),
    "parameters_with_patterns": lora(
        "experts", target_modules=[], alpha_pattern={"mlp.gate.weight": 2, "q_proj.weight": 20, "mlp.experts.down_proj": 3}, use_rslora=True,
        target_parameters=["mlp.gate.weight", "self_attn.q_proj.weight", "mlp.experts.down_proj"],
    ),
    "parameters_with_patterns_of_modules": lora(
        "experts", target_modules=[], alpha_pattern={"mlp.gate": 2, "q_proj": 20}, target_parameters=["mlp.gate.weight", "q_proj.weight"],
    ),
    "patterns_of_which_two_match": lora(
        "untied", target_modules=["q_proj", "v_proj"], alpha_pattern={"q_proj": 3, "layers.0.self_attn.q_proj": 12, r".*\.1\..*": 5},
    ),
    "dora_fused_with_patterns": lora("phi3", use_dora=True, use_rslora=True, target_modules=["qkv_proj", "gate_up_proj"], rank_pattern={"qkv_proj": 2}, alpha_pattern={"gate_up_proj": 3}),
    "negative_alpha": lora("untied", "lora_alpha = -3: must be greater than 0", lora_alpha=-3),
    "alpha_of_zero": lora("untied", "alpha_pattern.q_proj = 0: must be greater than 0", alpha_pattern={"q_proj": 0}),
    "lora_bias": lora("biased", lora_bias=True),
    "lora_bias_fused": lora("gpt2", target_modules=["c_attn", "c_fc"], lora_bias=True),
    "lora_bias_without": lora("untied", "lora_bias = true is not supported for .*q_proj", lora_bias=True),
"gaussian": lora(init_lora_weights="gaussian"),
    "eva": lora(init_lora_weights="eva"),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "mica": lora(init_lora_weights="mica"),
    "pissa": lora("untied", "init_lora_weights = 'pissa' is not supported", init_lora_weights="pissa"),
    "pissa_niter": lora("untied", "init_lora_weights = 'pissa_niter_4' is not", init_lora_weights="pissa_niter_4"),
    "olora": lora("untied", "init_lora_weights = 'olora' is not supported", init_lora_weights="olora"),
    "alora": lora("untied", "alora_invocation_tokens = .* is not supported", alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"),
    "replicated_layers": lora("untied", r"layer_replication = .* is not supported", layer_replication=[(0, 2), (1, 2)]),
    "blocks": lora("untied", "use_bdlora = .* is not supported", use_bdlora={"nblocks": 2, "target_modules_bd_a": ["q_proj"]}),
    "kasa": lora("untied", "kasa_config = .* is not supported", kasa_config={}),
    "ia3": Case("untied", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}, "IA3Config", "peft_type = 'IA3' is not supported"),
    "adalora": Case("untied", {"target_modules": ["q_proj"], "total_step": 9}, "AdaLoraConfig", "peft_type = 'ADALORA'"),
    **{
        kind.lower(): Case("untied", {"target_modules": ["q_proj"], **options}, f"{kind}Config", f"peft_type = '{kind.upper()}' is not supported")
        for kind, options in {
            "LoHa": {}, "LoKr": {}, "OFT": {"oft_block_size": 4, "r": 0}, "BOFT": {"boft_block_size": 4}, "Vera": {"r": 4}, "FourierFT": {"n_frequency": 9},
            "HRA": {}, "Poly": {"r": 2}, "VBLoRA": {"vector_length": 4, "num_vectors": 8}, "Miss": {"r": 4}, "RandLora": {"r": 4}, "Shira": {"r": 2},
            "C3A": {"block_size": 4}, "Road": {"group_size": 4},
        }.items()
    },
    "ln_tuning": Case("untied", {"target_modules": ["norm"]}, "LNTuningConfig", "peft_type = 'LN_TUNING'"),
    "prefix": Case("untied", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}, "PrefixTuningConfig", "peft_type = 'PREFIX_TUNING'"),
    "prompt": Case("untied", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}, "PromptTuningConfig", "peft_type = 'PROMPT_TUNING'"),
    "p_tuning": Case("untied", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM", "encoder_hidden_size": 8}, "PromptEncoderConfig", "peft_type = 'P_TUNING'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models of transformers'."""
    out = {}
    for name, (family, fields) in BASES.items():
        config = find_family_by_name(family).write_config_json(ModelConfig.model_validate({**BASE, **fields}))
        config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
            for key, weight in made.named_parameters():
                if key.endswith("bias"):
                    torch.nn.init.normal_(weight, std=0.1)
        out[name] = tmp_path_factory.mktemp("bases") / name
        made.save_pretrained(out[name])
    return out


def save_with_peft(case: Case, base: Path, folder: Path) -> None:
    """Save an adapter that PEFT makes, trained to random weights."""
    options = dict(case.options)
    if "use_bdlora" in options:
        options["use_bdlora"] = peft.tuners.lora.config.BdLoraConfig(**options["use_bdlora"])
    if "kasa_config" in options:
        options["kasa_config"] = peft.tuners.lora.config.KasaConfig()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = peft.get_peft_model(load(base), getattr(peft, case.kind)(**options))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn_like(weight) / 8)
        model.save_pretrained(folder)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft_s_is_computed_as_there_or_refused_by_name(
    name: str, bases: Mapping[str, Path], tmp_path: Path
) -> None:
    case = CASES[name]
    base, adapter, merged = bases[case.base], tmp_path / "adapter", tmp_path / "merged"
    save_with_peft(case, base, adapter)
    if case.refused:
        with pytest.raises(CheckpointError, match=case.refused):
            convert_checkpoint(base, merged, "hf", options=ConvertOptions(adapter=str(adapter)))
        return
    convert_checkpoint(base, merged, "hf", options=ConvertOptions(adapter=str(adapter)))
    theirs = logits(peft.PeftModel.from_pretrained(load(base), adapter).eval(), TOKENS)
    assert (theirs - logits(load(base), TOKENS)).abs().max() > 1e-3
    torch.testing.assert_close(logits(load(merged), TOKENS), theirs, rtol=0, atol=5e-6)
    ours, positions = load_inference_model(base, adapter=adapter), torch.arange(TOKENS.shape[1]).expand(TOKENS.shape)
    with torch.no_grad():
        found = ours.compute_logits(ours(ours.embed_inputs(TOKENS, positions), ours.make_forward_context(positions)))
    torch.testing.assert_close(found, theirs, rtol=0, atol=5e-6)


SMALL: Mapping[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gemma2": SMALL,  # tied, with a scaled embedding
    "cohere": SMALL,
    "deepseek_v3": SMALL | EXPERTS | {
        "num_key_value_heads": 4, "head_dim": 4, "n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8,
    },
    "qwen3_next": SMALL | EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "falcon": {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2,
        "new_decoder_architecture": True, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt_oss": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{"modules_to_save": ["embed_tokens", "word_embeddings"]}, {"bias": "all"}])
def test_all_linear_layers_of_other_families(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "base")
    save_with_peft(lora(target_modules="all-linear", **options), tmp_path / "base", tmp_path / "adapter")
    theirs = logits(peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval(), TOKENS)
    assert (theirs - logits(load(tmp_path / "base"), TOKENS)).abs().max() > 1e-3
    convert_checkpoint(
        tmp_path / "base", tmp_path / "merged", "hf", options=ConvertOptions(adapter=str(tmp_path / "adapter"))
    )
    torch.testing.assert_close(logits(load(tmp_path / "merged"), TOKENS), theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("targets", [["shared"], ["q", "lm_head"]])
def test_an_embedding_that_an_encoder_shares_is_refused(targets: list[str], tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=61, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    base = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(target_modules=targets)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=f"an adapter of {targets[-1]}.weight is not supported in a t5 model"):
        open_weights_with_adapter(tmp_path / "adapter", tmp_path / "base")


def test_every_other_type_and_option_is_refused_by_name(bases: Mapping[str, Path], tmp_path: Path) -> None:
    """Among them options of a newer PEFT, and those whose adapters need data or other libraries to be made."""
    save_with_peft(CASES["rslora"], bases["untied"], tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    raw = json.loads(path.read_text())
    types = {kind.value for kind in peft.PeftType} - {"LORA", "TRAINABLE_TOKENS"}
    changes: list[tuple[str, Any]] = [("peft_type", kind) for kind in sorted(types)]
    changes += [("init_lora_weights", init) for init in ("loftq", "corda", "lora_ga", "pissa_niter_16", "newer")]
    changes += [
        ("megatron_config", {"tensor_model_parallel_size": 2}), ("use_qalora", True), ("monteclora_config", {"n": 1}), ("arrow_config", {"top_k": 1}),
        ("kasa_config", {"beta": 1}), ("layer_replication", [[0, 1]]), ("alora_invocation_tokens", [1]), ("use_bdlora", True),
        ("use_something_newer", True), ("bias", "some"),
    ]  # fmt: skip
    for key, value in changes:
        path.write_text(json.dumps({**raw, key: value}))
        with pytest.raises(CheckpointError, match=rf"adapter_config.json: {key} = .* is not supported"):
            open_weights_with_adapter(tmp_path / "adapter", bases["untied"])
    harmless = {
        "eva_config": {"rho": 2.0},
        "velora_config": {"rank": 1},
        "loftq_config": {},
        "newer": None,
        "newest": [],
    }
    path.write_text(json.dumps({**raw, **harmless}))
    open_weights_with_adapter(tmp_path / "adapter", bases["untied"])


def test_an_adapter_beside_other_files_of_a_model_is_not_ignored(bases: Mapping[str, Path], tmp_path: Path) -> None:
    """Saved into the folder of a model, or with a config.json: transformers loads its base and the adapter."""
    save_with_peft(CASES["rslora"], bases["untied"], tmp_path)
    expected = open_weight_source(tmp_path).read_tensor("model.layers.0.self_attn.q_proj.weight")
    load(bases["untied"]).config.save_pretrained(tmp_path)
    assert torch.equal(open_weight_source(tmp_path).read_tensor("model.layers.0.self_attn.q_proj.weight"), expected)
    load(bases["untied"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="must not have weights of a model"):
        open_weight_source(tmp_path)


def test_the_tokenizer_beside_an_adapter_goes_with_it(bases: Mapping[str, Path], tmp_path: Path) -> None:
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    load(bases["untied"]).save_pretrained(base)
    save_with_peft(CASES["rslora"], base, adapter)
    for text, folder in (("the end of the story", base), ("another story", adapter)):
        train_tokenizer([text] * 3, 260, folder)
    (base / "chat_template.jinja").write_text("of the base")
    for folder, name in ((base, "base"), (adapter, "tools")):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text("one more")
    convert_checkpoint(base, merged, "hf", options=ConvertOptions(adapter=str(adapter)))
    own = (adapter / "tokenizer.json").read_bytes()
    assert own != (base / "tokenizer.json").read_bytes()
    assert (merged / "tokenizer.json").read_bytes() == own
    assert not (merged / "chat_template.jinja").exists()
    assert [path.name for path in (merged / "additional_chat_templates").iterdir()] == ["tools.jinja"]
    assert load_tokenizer(base, adapter).path.read_bytes() == own
    with pytest.raises(CheckpointError, match=r"tokenizer\.json conflicts with that of the base"):
        LoraAdapterSet.open_adapters(base, {"mine": str(adapter)})
    (adapter / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    LoraAdapterSet.open_adapters(base, {"mine": str(adapter)})


def test_of_several_adapters_each_is_read_from_its_folder(bases: Mapping[str, Path], tmp_path: Path) -> None:
    first, second = (peft.LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False) for rank in (2, 3))
    model = peft.get_peft_model(load(bases["untied"]), first, adapter_name="one")
    model.add_adapter("two", second)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)must be an adapter.*one of the adapters inside: one, two"):
        open_weights_with_adapter(tmp_path, bases["untied"])
    for name in ("one", "two"):
        theirs = logits(peft.PeftModel.from_pretrained(load(bases["untied"]), tmp_path / name).eval(), TOKENS)
        convert_checkpoint(
            bases["untied"], tmp_path / f"m-{name}", "hf", options=ConvertOptions(adapter=str(tmp_path / name))
        )
        torch.testing.assert_close(logits(load(tmp_path / f"m-{name}"), TOKENS), theirs, rtol=0, atol=5e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("saved_embedding_tied", ""), ("saved_head_tied", ""), ("saved_both", ""), ("saved_norm", ""), ("lora_head_tied", ""), ("patterns", ""),
        ("lora_embedding_tied", ""), ("all_linear_gpt2", ""),
        ("lora_head_only_rslora", "requires a module with a low-rank adapter"), ("bias_all", "modules are saved whole"), ("lora_bias_fused", "must be a separate tensor"),
        ("tokens", "tied to the output layer"),
    ],
)  # fmt: skip
def test_an_adapter_of_peft_s_goes_back_to_peft_or_is_refused(
    name: str, refused: str, bases: Mapping[str, Path], tmp_path: Path
) -> None:
    case = CASES[name]
    base, adapter, out = bases[case.base], tmp_path / "adapter", tmp_path / "out"
    save_with_peft(case, base, adapter)
    if refused:
        with pytest.raises(CheckpointError, match=refused):
            convert_checkpoint(adapter, out, "peft")
        return
    convert_checkpoint(adapter, out, "peft")
    first, second = (logits(peft.PeftModel.from_pretrained(load(base), one).eval(), TOKENS) for one in (adapter, out))
    torch.testing.assert_close(second, first, rtol=0, atol=5e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_pickled_file_a_wider_vocabulary_and_a_part_of_a_model(bases: Mapping[str, Path], tmp_path: Path) -> None:
    save_with_peft(CASES["patterns"], bases["untied"], tmp_path / "safe")
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "safe" / "adapter_model.safetensors")
    whole = open_weight_source(tmp_path / "safe").read_tensor("lm_head.weight")
    (tmp_path / "safe" / "adapter_model.safetensors").unlink()
    torch.save(state, tmp_path / "safe" / "adapter_model.bin")
    assert torch.equal(open_weight_source(tmp_path / "safe").read_tensor("lm_head.weight"), whole)
    (tmp_path / "safe" / "adapter_model.bin").unlink()
    for change, refused in (
        ({"base_model.model.lm_head.weight": torch.zeros(70, 24)}, r"lm_head\.weight has shape \[70, 24\].*--vocab-size"),
        ({"base_model.model.model.visual.fc.lora_A.weight": torch.zeros(1, 2)}, r"the module model\.visual\.fc is not supported"),
        ({"base_model.model.lm_head.lora_B.weight": None}, "the module lm_head is not supported"),
        ({"base_model.model.model.layers.1.mlp.down_proj.lora_A.weight": torch.zeros(0)}, r"down_proj.*has shape \[0\]"),
        ({"base_model.model.model.layers.1.mlp.down_proj.lora_B.weight": torch.zeros(9, 2)}, "has 9 rows instead of 24"),
    ):  # fmt: skip
        changed = {key: tensor for key, tensor in {**state, **change}.items() if tensor is not None}
        save_file(changed, tmp_path / "safe" / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=f"(?s){refused}"):
            open_weight_source(tmp_path / "safe")


@pytest.mark.parametrize(("key", "value", "found"), [
    ("lora_alpha", "many", "lora_alpha = 'many': must be a number"),
    ("lora_alpha", float("nan"), "lora_alpha = nan: must be a finite number"),
    ("alpha_pattern", ["q_proj"], "alpha_pattern = .*: must be a section"),
    ("alpha_pattern", {"(": 2}, r"alpha_pattern: the key '\(' is no regular expression"),
    ("lora_dropout", 1, "lora_dropout = 1: must be less than 1"),
    ("lora_dropout", {}, "lora_dropout: must be a number"),
    ("target_parameters", True, "target_parameters = true: must be a list"),
    ("target_parameters", [3], "target_parameters.0 = 3: must be a text"),
    ("use_rslora", "sure", "use_rslora = 'sure': must be true or false"),
    ("use_dora", [1], "use_dora = .*: must be true or false"),
])  # fmt: skip
def test_an_option_of_a_wrong_type_is_named(key: str, value: object, found: str) -> None:
    with pytest.raises(CheckpointError, match=f"adapter_config.json: {found}"):
        check_peft_options({"peft_type": "LORA", key: value}, "adapter_config.json")
