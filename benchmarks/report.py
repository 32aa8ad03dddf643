"""Write the table and the chart of docs/performance.md from what the suite has found (benchmarks/results).

python benchmarks/report.py            writes them
python benchmarks/report.py --check    only says whether they are what the figures give
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from drawing import chart
from results import RESULTS, Figures, read_all

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "images" / "peers.svg"
BETWEEN = re.compile(r"(<!-- make bench-report -->\n).*?(<!-- until here -->)", re.DOTALL)


def table(rows: list[Figures], records: list[dict[str, object]]) -> str:
    """Markdown: on what it was measured, and a line for each workload."""
    dates = sorted({str(record["date"])[:10] for record in records})
    machine, versions = records[0]["machine"], records[0]["versions"]
    assert isinstance(machine, dict)
    assert isinstance(versions, dict)
    loads = [record["machine"][when] for record in records for when in ("load before", "load after")]  # type: ignore[index]
    lines = [
        f"{machine['cores']} cores ({machine['processor']}), torch {versions['torch']}, Python {versions['python']}, "
        f"{' – '.join(dict.fromkeys((dates[0], dates[-1])))}; the load of the machine was {min(loads):.1f} to "
        f"{max(loads):.1f}, of which the workload itself is {machine['cores']} at most.",
        "",
        "| workload | ours / theirs | time (least – most) | CPU time | cores busy | memory (in steps) | at most | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        most = f"{row.workload.target:g}" + (
            f", memory {row.workload.memory_target:g}" if row.workload.memory_target else ""
        )
        cells = (
            row.workload.title,
            f"{row.ours} / {row.theirs}",
            f"{row.time:.3f} ({row.low:.3f} – {row.high:.3f})",
            f"{row.cpu:.2f}" if row.cpu is not None else "",
            " / ".join(f"{cores:.2f}" for cores in row.busy or ()),
            f"{row.memory:.2f} ({row.memory_of_steps:.2f})" if row.memory is not None else "",
            most,
            "kept" if row.kept else "**not kept**",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def made(page: str, folder: Path) -> tuple[str, str]:
    """The page with the table that a folder's figures give, and the chart."""
    rows = read_all(folder)
    records = [json.loads((folder / f"{row.workload.name}.json").read_text("utf-8")) for row in rows]
    inside = f"\n![Ratios of step times](images/{PICTURE.name})\n\n{table(rows, records)}\n"
    text, count = BETWEEN.subn(lambda found: found[1] + inside + found[2], page)
    if count != 1:
        raise click.ClickException(f"{PAGE.name} has {count} places for the table; one was expected")
    return text, chart(rows)


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; say whether the page is what the figures give.")
@click.option("--results", type=click.Path(path_type=Path, exists=True), default=RESULTS)
def main(check: bool, results: Path) -> None:
    """Write the table and the chart of docs/performance.md."""
    was = PAGE.read_text("utf-8")
    page, picture = made(was, results)
    if check:
        if (was, PICTURE.read_text("utf-8") if PICTURE.exists() else "") != (page, picture):
            raise click.ClickException(
                "docs/performance.md is not what benchmarks/results gives; run: make bench-report"
            )
        return
    PAGE.write_text(page, encoding="utf-8")
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
