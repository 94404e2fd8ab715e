"""Formats byte counts for people."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: float) -> str:
    """Formats a number of bytes with a unit: 1536 becomes 1.5 KiB."""
    unit = 0
    while abs(num_bytes) >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return (
        f"{num_bytes:.0f} {_UNITS[unit]}"
        if unit == 0 or abs(num_bytes) >= 100
        else f"{num_bytes:.1f} {_UNITS[unit]}"
    )
