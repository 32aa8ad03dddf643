"""Imports every file of recipes, which registers them."""

from recipes import (
    adversarial,
    averaging,
    copied,
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
    projects,
    reinforcement,
    science,
    scripted,
    sequences,
    trainers,
    tuning,
    vision,
    zoo,
)

__all__ = [
    "adversarial", "averaging", "functional", "generation", "generative", "graphs", "keeping", "losses", "optimizers",
    "precision", "reinforcement", "science", "sequences", "tuning", "vision",
    "copied", "habits", "masks", "projects", "scripted", "trainers", "zoo",
]  # fmt: skip
