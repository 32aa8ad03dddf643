"""Say how large the slots are in which a rank leaves what others of its machine read in collectives."""

from __future__ import annotations

LONGEST = 1 << 23  # bytes of a slot at most: what is longer goes in ranges


def slots_of(longest: int, most: int = LONGEST) -> tuple[int, int]:
    """How many slots a rank has for the collectives of a group, and their bytes, if it puts in ``longest`` at most.

    It fills one while others may still read the one before; of what goes in ranges, of ``most`` bytes, it fills one
    ahead of the one that it reads.
    """
    return (2 if longest <= most else 4), min(most, longest)
