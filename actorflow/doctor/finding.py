"""The finding of a check: what was found, why it matters, and what to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One condition that was found.

    ``found``, ``why`` and ``advice`` are whole sentences, so that they read well alone and in a row.
    """

    condition: str  # what a table calls it: "port in use"
    found: str
    why: str
    advice: str
    certain: bool = True  # it stops the run; else it may

    @property
    def text(self) -> str:
        """All of it as one paragraph."""
        return " ".join(part for part in (self.found, self.why, self.advice) if part)
