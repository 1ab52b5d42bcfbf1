"""Decimal text of integers of any size, both directions.

Here and nowhere else loomfast turns integers into digits and back. `str` and `int` refuse integers above a
limit that a program may change (`sys.set_int_max_str_digits`); what was accepted into a log must be readable
in every process, so the limit must not apply.

Invariant: `integer(text(n)) == n` for every int, whatever the interpreter's limit, never a ValueError.

Large numbers are halved until a piece is below the smallest limit that the interpreter allows (640 digits):
`10**1000 + 7` is split by `10**512` into a high and a low part, and the low part is padded to 512 digits.
"""

from __future__ import annotations

# Below the smallest value sys.set_int_max_str_digits accepts.
_PIECE = 512
# Any int of at most this many bits has at most _PIECE digits.
_PIECE_BITS = 1700


def text(value: int) -> str:
    """Return the exact decimal digits of `value`, with `-` in front of a negative one."""
    if value.bit_length() <= _PIECE_BITS:
        return str(value)
    if value < 0:
        return "-" + text(-value)
    powers = [10**_PIECE]
    while powers[-1] <= value:
        powers.append(powers[-1] ** 2)
    return _split(value, powers, len(powers) - 1).lstrip("0")


def _split(value: int, powers: list[int], level: int) -> str:
    """Return `value` padded to `_PIECE * 2**level` digits; it is below `powers[level]`."""
    if level == 0:
        return str(value).zfill(_PIECE)
    high, low = divmod(value, powers[level - 1])
    return _split(high, powers, level - 1) + _split(low, powers, level - 1)


def integer(digits: str) -> int:
    """Return the integer that `digits` (an optional `-`, then only 0-9) spells."""
    if len(digits) <= _PIECE:
        return int(digits)
    if digits[0] == "-":
        return -integer(digits[1:])
    padded = digits.zfill(-(-len(digits) // _PIECE) * _PIECE)
    pieces = [int(padded[at : at + _PIECE]) for at in range(0, len(padded), _PIECE)]
    power = 10**_PIECE
    while len(pieces) > 1:
        if len(pieces) % 2:
            pieces.insert(0, 0)
        pieces = [pieces[at] * power + pieces[at + 1] for at in range(0, len(pieces), 2)]
        power *= power
    return pieces[0]
