from __future__ import annotations

from pathlib import Path

import pytest

from mega_common.errors import ConfigError
from mega_trainer.plan.kernel_throughput import GpuThroughput
from mega_trainer.plan.machine import (
    MAX_ATTENTION_SHARE,
    MAX_GEMM_SHARE,
    list_machine_names,
    load_default_efficiencies,
    load_machine,
)


def test_every_machine_has_rates_and_the_efficiency_of_its_generation() -> None:
    efficiencies = load_default_efficiencies()
    assert set(list_machine_names()) == {
        "a100-40", "a100-80", "h100", "h100-500w", "h200", "b200", "b300", "gb200", "gb300", "l40s", "mi300x", "mi355x"
    }  # fmt: skip
    for name in list_machine_names():
        machine = load_machine(name)
        assert machine.generation in efficiencies
        assert machine.get_peak_flops("bf16") > machine.get_peak_flops("fp32") > 1e12
        assert machine.get_peak_flops("fp8") >= machine.get_peak_flops("bf16")


def test_a_network_stands_behind_the_name() -> None:
    assert load_machine("h100-ib").network_gb_s == load_machine("h100").network_gb_s == 50
    assert load_machine("a100-40-ethernet").memory_gb == 40
    assert load_machine("a100").memory_gb == 80
    with pytest.raises(ConfigError, match="h100 has no network 'tokenring'"):
        load_machine("h100-tokenring")
    with pytest.raises(ConfigError, match="did you mean h100"):
        load_machine("h10")


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    figures = "{gpu: Mine, generation: ada, memory_gb: 24, memory_gb_s: 900, link_gb_s: 30, networks_gb_s: {lan: 1}, ranks_per_node: 2"
    (tmp_path / "mine.yaml").write_text(figures + ", tflops: {bf16: 100}}")
    (tmp_path / "less.yaml").write_text(figures + "}")
    assert load_machine(str(tmp_path / "mine.yaml")).get_peak_flops("fp8") == 100e12
    with pytest.raises(ConfigError, match="peak rate of the GPU 'Mine' is unknown"):
        load_machine(str(tmp_path / "less.yaml")).get_peak_flops("bf16")


def test_long_gemms_follow_the_power_limit_and_not_the_peak() -> None:
    """B200 and GB200 are one chip: with 1,000 and 1,200 W, and peaks of 2.25 and 2.5 PFLOP/s. No rate is above its peak."""
    efficiency = load_default_efficiencies()["blackwell"]
    machines = [load_machine("b200"), load_machine("gb200"), load_machine("b200").model_copy(update={"power_w": 3000})]
    less, more, capped = (GpuThroughput.from_machine(one, efficiency, "fused") for one in machines)
    for precision in ("bf16", "fp8", "nvfp4"):
        assert more.product[precision] / less.product[precision] == pytest.approx(1.2**efficiency.power)
        assert more.product[precision] == getattr(efficiency, precision) * machines[1].get_peak_flops(precision)
    assert more.attention / less.attention == pytest.approx(1.2**efficiency.power)
    assert capped.product["bf16"] == MAX_GEMM_SHARE * machines[0].get_peak_flops("bf16")
    unstated = machines[0].model_copy(update={"power_w": None})
    rates = GpuThroughput.from_machine(unstated, efficiency, "fused")
    assert rates.product["bf16"] == efficiency.bf16 * machines[0].get_peak_flops("bf16")


def test_gpu_with_much_power_and_low_peak_sustains_what_was_measured_of_it() -> None:
    """An H20 has 500 W for 148 TFLOP/s: less than its peak, not the 730 that the power of an H100 would give."""
    peak, efficiency = 148e12, load_default_efficiencies()["hopper"]
    machine = load_machine("h100").model_copy(update={"gpu": "H20", "power_w": 500})
    assert machine.get_peak_flops("bf16") == peak
    assert machine.get_reference_flops("bf16", efficiency.power) > 4 * peak
    rates = GpuThroughput.from_machine(machine, efficiency, "fused")
    assert rates.product["bf16"] == MAX_GEMM_SHARE * peak
    assert rates.product["fp8"] == MAX_GEMM_SHARE * 2 * peak
    assert rates.attention == MAX_ATTENTION_SHARE * peak
    measured = machine.get_sustained_flops("bf16", 1.0, efficiency.power)  # a share of 1 is a machine's own measurement
    assert measured == peak
