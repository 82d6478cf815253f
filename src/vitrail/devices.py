"""Device selection and peak rates of GPUs."""

from typing import NamedTuple

import torch

from vitrail.errors import ConfigError


class PeakRate(NamedTuple):
    """Peak dense FLOPs per second of a GPU, from its datasheet."""

    bfloat16: float
    float32: float


PEAK_RATES = {
    "B200": PeakRate(2250e12, 75e12),
    "H200": PeakRate(989e12, 67e12),
    "H100 PCIe": PeakRate(756e12, 51e12),
    "H100": PeakRate(989e12, 67e12),
    "A100": PeakRate(312e12, 19.5e12),
    "L40S": PeakRate(362e12, 91.6e12),
    "RTX 4090": PeakRate(165e12, 82.6e12),
}
"""Part of the device name → its rates. The first match applies."""


def list_usable_devices() -> list[str]:
    """Return the types of devices that torch can use on this machine."""
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    return ["cpu", *(name for name, is_available in available.items() if is_available())]


def resolve_device(device: str | torch.device | None) -> str:
    """Return the given device; for None and "auto", "cuda" if a GPU exists, else "cpu". Raise if it cannot compute."""
    usable, name = list_usable_devices(), str(device or "auto")
    if name == "auto":
        name = "cuda" if "cuda" in usable else "cpu"
    remedy = f"use {' or '.join(usable)}, or omit the device"
    if name.partition(":")[0] not in usable:
        raise ConfigError(f"device {name!r} is not available on this machine", remedy)
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}", remedy) from None
    return name


def get_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOPs per second of a device for matrix products in a dtype, or None if it is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    rate = next((rate for part, rate in PEAK_RATES.items() if part in name), None)
    if rate is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return rate.bfloat16
    # TF32 products run at half the bfloat16 rate.
    return rate.float32 if torch.get_float32_matmul_precision() == "highest" else rate.bfloat16 / 2
