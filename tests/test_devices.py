"""Device selection and peak rates."""

import pytest
import torch

from vitrail import devices
from vitrail.errors import ConfigError


def test_unavailable_device_names_the_usable_ones(monkeypatch):
    monkeypatch.setattr(devices, "list_usable_devices", lambda: ["cpu", "cuda"])
    with pytest.raises(ConfigError, match=r"'mps' is not available(.|\n)*use cpu or cuda"):
        devices.resolve_device("mps")


@pytest.mark.parametrize("name", ["mps", "meta", "tpu", "cuda:99", ""])
def test_error_is_short(name):
    if name and name not in devices.list_usable_devices():
        with pytest.raises(ConfigError) as error:
            devices.resolve_device(name)
        assert len(str(error.value)) < 300 and "cpu" in error.value.remedy
    else:
        assert devices.resolve_device(name) in devices.list_usable_devices()


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H200", torch.float32, 67e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA Unknown", torch.bfloat16, None),
    ],
)
def test_peak_rate_is_found_by_name(monkeypatch, name, dtype, rate):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    assert devices.get_peak_flops(torch.device("cuda"), dtype) == rate


def test_tf32_has_half_the_bfloat16_rate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert devices.get_peak_flops(torch.device("cuda"), torch.float32) == 989e12 / 2


def test_peak_rate_of_a_cpu_is_unknown():
    assert devices.get_peak_flops(torch.device("cpu"), torch.float32) is None
