"""Sizes and times as people read them."""

from __future__ import annotations


def amount(num_bytes: float) -> str:
    """Bytes in the unit that fits, powers of 1000."""
    return _scaled(num_bytes, "B")


def operations(flops: float) -> str:
    """Floating-point operations in the unit that fits."""
    return _scaled(flops, "FLOP")


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    units = (("days", 86400.0, 2), ("h", 3600.0, 2), ("min", 60.0, 2), ("s", 1.0, 1), ("ms", 1e-3, 1))
    for unit, length, least in units:
        if seconds >= least * length:
            return f"{_digits(seconds / length)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _scaled(value: float, unit: str) -> str:
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while round(value, 1) >= 1000 and power < len(prefixes) - 1:
        value /= 1000
        power += 1
    return f"{_digits(value)} {prefixes[power]}{unit}"
