"""Format numbers with units."""

import math


def format_si(value: float, unit: str) -> str:
    """Format with three digits and an SI prefix: 1234567 → "1.23 M…"."""
    if value == 0:
        return f"0 {unit}"
    value = float(f"{value:.2e}")
    tens = math.floor(math.log10(abs(value)))
    power = min(max(tens // 3, -3), 6)
    return f"{value / 1000**power:.{max(0, 2 - tens + 3 * power)}f} {'nµm kMGTPE'[power + 3].strip()}{unit}"


def format_token_count(count: int) -> str:
    """Format a token count: 8192 → "8k"; other multiples are written out."""
    if count % 2**20 == 0:
        return f"{count // 2**20}M"
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"
