"""Write ``docs/recipes.md`` from the recipes.

python tests/recipes/document.py
"""

from __future__ import annotations

from pathlib import Path

import recipes.all  # noqa: F401
from recipes.layouts import LAYOUTS
from recipes.recipe import RECIPES, Recipe

__all__ = ["OUTPUT", "document"]

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"

HEAD = """# Recipes

Made by `python tests/recipes/document.py`. {count} trainings as people write them for one device, each a few lines of
PyTorch in `tests/recipes`. The tests train each of them eagerly and as a job: on one device, data
parallel on 2, with `parallel="tensor"` on 2, on 2 stages with 2 micro-batches, and with ZeRO 3 on 2. What every call
returns, and all parameters, buffers and state of optimizers after the last one are compared: in float64 to 1e-9 of a
tensor's largest element; in bfloat16 a job may not be much further from eager float32 than eager bfloat16 is.

{refused} more are [refused](#what-is-refused), with what to do instead.
"""


def document() -> str:
    """The page."""
    trained = [r for r in RECIPES.values() if r.layouts]
    refused = [r for r in RECIPES.values() if r.refused is not None]
    parts = [HEAD.format(count=len(trained), refused=sum(not r.layouts for r in refused))]
    for kind in dict.fromkeys(r.kind for r in trained):
        parts.append(f"## {kind[0].upper()}{kind[1:]}\n\n| recipe | what is in it | layouts |\n|---|---|---|")
        parts[-1] += "".join(f"\n| {r.name} | {r.shows} | {_layouts(r)} |" for r in trained if r.kind == kind) + "\n"
    whole = {r.whole: [o.name for o in trained if o.whole == r.whole] for r in trained if r.whole}
    parts.append("## What is not cut into micro-batches\n")
    parts.append("\n".join(f"- {', '.join(names)}: {why}." for why, names in whole.items()) + "\n")
    parts.append("## What is refused\n\n| recipe | why | what to do instead |\n|---|---|---|")
    parts[-1] += "".join(_refused(r) for r in refused) + "\n"
    if known := [r for r in RECIPES.values() if r.known]:
        parts.append("## What is wrong today\n")
        parts.append("\n".join(f"- {r.name} {text}." for r in known for text in _known(r)) + "\n")
    return "\n".join(parts)


def _layouts(recipe: Recipe) -> str:
    left = [name for name in LAYOUTS if name not in recipe.layouts]
    whole = ["pipeline 2 without micro-batches"] * bool(recipe.whole and "pipeline 2" in recipe.layouts)
    return ", ".join(["all" if not left else f"all but {', '.join(left)}", *whole])


def _known(recipe: Recipe) -> list[str]:
    reasons = {why: [layout for layout in recipe.known if recipe.known[layout] == why] for why in recipe.known.values()}
    return [f"({'all' if len(of) == len(LAYOUTS) else ', '.join(of)}): {why}" for why, of in reasons.items()]


def _refused(recipe: Recipe) -> str:
    assert recipe.refused is not None
    where = f" ({', '.join(recipe.refused.layouts)})" if recipe.refused.layouts else ""
    return f"\n| {recipe.name}{where} | {recipe.refused.why} | {recipe.refused.instead} |"


if __name__ == "__main__":
    OUTPUT.write_text(document())
