"""Imports every file of recipes, which registers them."""

from recipes import (
    adversarial,
    functional,
    generative,
    graphs,
    keeping,
    losses,
    masks,
    optimizers,
    precision,
    reinforcement,
    science,
    sequences,
    tuning,
    vision,
)

__all__ = [
    "adversarial", "functional", "generative", "graphs", "keeping", "losses", "masks", "optimizers", "precision",
    "reinforcement", "science", "sequences", "tuning", "vision",
]  # fmt: skip
