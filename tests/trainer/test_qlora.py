"""A run that trains an adapter beside a base in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trainer.test_lora import CONSTANT, bits, check_is_peft_s, checkpoint_of, first_step, trained

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.source import open_weight_source
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.parallel.parameter_info import get_quantized_weight
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.run.train_state import TrainState, collect_stage_weights
from mega_trainer.run.training_run import build_training_state_and_executor

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
Settings = Callable[..., dict[str, Any]]
WIDE = {"hidden_size": 64, "ffn_hidden_size": 128}


@pytest.fixture
def tuning(settings: Settings, tmp_path: Path) -> Settings:
    """A run with an adapter beside the weights of a short run, in 4 bits."""
    base = settings(model=WIDE, train={"steps": 2}, output=str(tmp_path / "base"))
    trained(base)

    def make(**sections: Any) -> dict[str, Any]:
        lora = {"rank": 3, "modules": ["q_proj", "down_proj"], "quantize": "nf4", **sections.pop("lora", {})}
        return settings(
            **{"model": WIDE, "init_from": base["output"], "lora": lora, "lr_schedule": CONSTANT, **sections}
        )

    return make


def assembled(raw: dict[str, Any]) -> TrainState:
    return build_training_state_and_executor(RunConfig.parse(raw), ParallelGroups(), torch.device("cpu"))[0]


def test_it_trains_as_beside_the_numbers_that_the_bits_stand_for(tuning: Settings, tmp_path: Path) -> None:
    """Every projection is in 4 bits, embedding, head and norms are as they were."""
    packed = trained(tuning(train={"steps": 3}))
    base, numbers = open_weight_source(tmp_path / "base"), collect_stage_weights(packed.stages)
    changed = {
        name for name in base.tensor_names() if not torch.equal(numbers[name].boxes[0].tensor, base.read_tensor(name))
    }
    assert changed == {name for name in numbers if name.endswith("_proj.weight")}
    convert_checkpoint(tmp_path / "base", tmp_path / "hf", "hf")
    rounded = {name: numbers[name].boxes[0].tensor.contiguous() for name in base.tensor_names()}
    save_file(rounded, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    plain = tuning(
        train={"steps": 3}, lora={"quantize": None}, init_from=str(tmp_path / "hf"), output=str(tmp_path / "plain")
    )
    expected, found = bits(trained(plain)), bits(packed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(a, b) for name in found for a, b in zip(found[name], expected[name], strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_adapter_alone_is_saved_and_goes_on_bitwise(tuning: Settings, tmp_path: Path, precision: str) -> None:
    straight = tuning(precision=precision, train={"steps": 4}, output=str(tmp_path / "straight"))
    halves = {**straight, "output": str(tmp_path / "halves")}
    whole = bits(trained(straight))
    trained({**halves, "train": {"steps": 2}})
    again = bits(trained({**halves, "train": {"steps": 4}}))
    assert whole.keys() == again.keys()
    assert all(torch.equal(a, b) for name in whole for a, b in zip(whole[name], again[name], strict=True))
    assert len(checkpoint_of(straight).tensor_keys("weights/")) == 2 * 2 * 2
    with pytest.raises(ConfigError, match=r"lora\.quantize: 'nf4' -> null"):
        trained({**halves, "train": {"steps": 5}, "lora": {**halves["lora"], "quantize": None}})


def test_what_is_read_of_a_run_is_the_base_in_full_with_the_adapter_in_it(tuning: Settings, tmp_path: Path) -> None:
    raw = tuning(train={"steps": 3})
    trained(raw)
    base, merged, saved = (
        open_weight_source(tmp_path / "base"),
        open_weight_source(tmp_path / "run"),
        checkpoint_of(raw),
    )
    name = "model.layers.1.mlp.down_proj"
    a, b = (saved.read_tensor(f"weights/{name}.lora_{part}.weight") for part in "AB")
    torch.testing.assert_close(
        merged.read_tensor(f"{name}.weight"), base.read_tensor(f"{name}.weight") + 32 / 3 * b @ a
    )


def test_the_plan_counts_the_bytes_that_are_held(tuning: Settings) -> None:
    raw = tuning(precision="bf16")
    parameters = [each for stage in assembled(raw).stages.values() for each in stage.parameters()]
    packed = [keeper for each in parameters if (keeper := get_quantized_weight(each)) is not None]
    of_packed = [each for each in parameters if get_quantized_weight(each) is not None]
    assert sum(keeper.nbytes for keeper in packed) == sum(each.numel() for each in of_packed) * (1 / 2 + 4 / 64) > 0
    assert all(each.untyped_storage().nbytes() == each.element_size() for each in of_packed)
    whole = sum(each.nbytes for each in parameters if get_quantized_weight(each) is None)
    config = RunConfig.parse(raw)
    counted = predict_memory(config.model, make_training_layout(config, 1))[0]["weights"]
    assert counted == whole + sum(keeper.nbytes for keeper in packed)


def test_what_does_not_go_with_it_is_told(tuning: Settings) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.zero = 3: is not supported with lora.quantize"):
        RunConfig.parse(tuning(parallel={"zero": 3}))
    with pytest.raises(ConfigError, match="is not supported with precision = fp8"):
        RunConfig.parse(tuning(precision="fp8"))
    with pytest.raises(ConfigError, match="is not supported with dora"):
        RunConfig.parse(tuning(lora={"dora": True}))
    with pytest.raises(
        ConfigError, match=r"requires rows of a multiple of 64 elements; those of .*down_proj\.weight have 24 on a rank"
    ):
        assembled(tuning(model={**WIDE, "ffn_hidden_size": 24}))


def test_loss_and_gradients_are_those_of_transformers_bitsandbytes_and_peft(tuning: Settings, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="accelerate, by which transformers loads in 4 bits, is not installed")
    convert_checkpoint(tmp_path / "base", tmp_path / "hf", "hf")
    bits4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", quantization_config=bits4, dtype=torch.float32, device_map="cpu"
    )
    wanted = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, wanted)
    theirs.enable_input_require_grads()  # without a gradient to bring back, bitsandbytes multiplies in bf16 on some CPUs
    theirs.save_pretrained(tmp_path / "adapter")
    lora = {"alpha": 5, "init_from": str(tmp_path / "adapter")}
    check_is_peft_s(first_step(tuning(init_from=str(tmp_path / "hf"), lora=lora)), theirs)
