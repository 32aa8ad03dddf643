"""Imports every file of recipes, which registers them."""

from recipes import (
    adversarial,
    averaging,
    functional,
    generation,
    generative,
    graphs,
    habits,
    keeping,
    losses,
    masks,
    optimizers,
    precision,
    reinforcement,
    science,
    scripted,
    sequences,
    tuning,
    vision,
)

__all__ = [
    "adversarial", "averaging", "functional", "generation", "generative", "graphs", "keeping", "losses", "optimizers",
    "precision", "reinforcement", "science", "sequences", "tuning", "vision",
    "habits", "masks", "scripted",
]  # fmt: skip
