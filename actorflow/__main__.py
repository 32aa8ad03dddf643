"""``python -m actorflow`` is the ``actorflow`` command."""

from __future__ import annotations

from actorflow.cli import main

if __name__ == "__main__":
    main(prog_name="actorflow")
