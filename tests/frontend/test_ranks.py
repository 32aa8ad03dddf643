"""Jobs on several ranks, through the real launcher."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import warm
from cluster.runs import Run

HEAD = """
import torch, torch.nn.functional as F
from torch import nn
import actorflow as flow

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def batch(i, n=12):
    g = torch.Generator().manual_seed(i)
    return torch.randn(n, 8, generator=g), torch.randint(0, 4, (n,), generator=g)

def trainer(model, optimizer):
    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return step

def same(a, b):
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)

rank, world = flow.env.rank(), flow.env.world_size()
model, eager = make(), make()
optimizer, eager_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, eager))
step, eager_step = flow.global_function(trainer(model, optimizer)), trainer(eager, eager_optimizer)
"""


LIMIT = 250  # seconds


@dataclass(frozen=True)
class Ended:
    """A run that is over."""

    code: int
    text: str  # the terminal and the logs of all ranks


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Run the lines of a script on some ranks, to its end."""

    def start(script: str, devices: int = 2, *arguments: str) -> Ended:
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(script))
        logs = tmp_path / "logs"
        made = Run(tmp_path, path, "--devices", str(devices), "--log-dir", str(logs), *arguments, python=warm.python())
        try:
            code = made.process.wait(LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(made.process.pid, signal.SIGKILL)
        assert made.ranks_left() == []
        return Ended(code, made.output + "".join(p.read_text() for p in sorted(logs.glob("*.log"))))

    return start


def test_one_rank_alone_may_read_state_while_the_others_go_on(run: Callable[..., Ended]):
    ended = run("""
        flow.distribute(model, {r"2\\.weight": flow.sbp.split(0), r"0\\.weight": flow.sbp.split(1)})
        for i in range(6):
            step(*batch(i))
            eager_step(*batch(i))
            if i % 2 == rank:  # the other rank makes more calls meanwhile
                same(model.state_dict(), eager.state_dict())
                same(optimizer.state_dict()["state"][0], eager_optimizer.state_dict()["state"][0])
                print("done with", i)
    """)
    assert ended.code == 0, ended.text
    assert ended.text.count("done with") == 6


def test_what_one_rank_reads_is_what_was_there_before_the_others_wrote(run: Callable[..., Ended]):
    ended = run("""
        flow.place(model, {"": flow.placement("cpu", [1])})
        step(*batch(0))
        for i in range(30):
            with torch.no_grad():
                model[0].weight.copy_(torch.full((16, 8), float(i)))
            if rank == 0:  # which holds nothing of it
                assert model[0].weight.detach().mean().item() == i
        print("equal")
    """)
    assert ended.code == 0, ended.text
    assert ended.text.count("equal") == 2


def test_state_is_loaded_into_every_ranks_part(run: Callable[..., Ended]):
    ended = run("""
        flow.distribute(model, {r"2\\..*": flow.sbp.split(0)})
        for i in range(2):
            step(*batch(i)); eager_step(*batch(i))
        saved = model.state_dict(), optimizer.state_dict()
        for i in range(2):
            step(*batch(i))
        model.load_state_dict(saved[0]); optimizer.load_state_dict(saved[1])
        if rank == 1:
            same(model.state_dict(), eager.state_dict())
        for i in range(3):
            torch.testing.assert_close(float(step(*batch(i))), eager_step(*batch(i)).item(), rtol=1e-5, atol=1e-6)
        print("equal")
    """)
    assert ended.code == 0, ended.text
    assert ended.text.count("equal") == 2


def test_split_state_of_the_optimizer_and_split_parameters_are_read_whole(run: Callable[..., Ended]):
    ended = run("""
        flow.zero(model, stage=3)
        flow.distribute(model, outputs={"1": flow.sbp.split(0)})
        predict = flow.global_function(type="predict")(lambda x: model(x))
        x, _ = batch(0)
        same({"y": predict(x)}, {"y": eager(x)})
        for i in range(3):
            step(*batch(i)); eager_step(*batch(i))
        same(model.state_dict(), eager.state_dict())
        for i in range(4):
            same(optimizer.state_dict()["state"][i], eager_optimizer.state_dict()["state"][i])
        same({"y": predict(x)}, {"y": eager(x)})
        print("equal")
    """)
    assert ended.code == 0, ended.text
    assert ended.text.count("equal") == 2


def test_ranks_with_different_hints_are_both_named(run: Callable[..., Ended]):
    ended = run("""
        flow.zero(model, stage=1 + rank)
        step(*batch(0))
    """)
    assert ended.code != 0
    assert "rank 0 has ZeRO for model.0.bias: stage 1" in ended.text
    assert "rank 1 has ZeRO for model.0.bias: stage 2" in ended.text


def test_a_large_result_stays_with_its_owners_until_one_rank_reads_it_and_goes_when_all_have_dropped_it(
    run: Callable[..., Ended],
):
    ended = run("""
        import gc, time
        from actorflow.session.process import current
        wide = nn.Linear(8, 4000)
        expected = nn.Linear(8, 4000)
        expected.load_state_dict(wide.state_dict())
        predict = flow.global_function(type="predict")(lambda x: wide(x))
        x, _ = batch(0)
        kept = [predict(x + i) for i in range(5)]
        assert current().context.world == 1 or len(current().runtime.results._kept) == 5
        if rank == 1:
            torch.testing.assert_close(kept[3].detach(), expected(x + 3).detach())
            print("read")
        del kept
        end = time.monotonic() + 100
        while current().runtime.results._kept and time.monotonic() < end:
            time.sleep(0.01)
        assert not current().runtime.results._kept
        print("gone")
    """)
    assert ended.code == 0, ended.text
    assert (ended.text.count("read"), ended.text.count("gone")) == (1, 2)


def test_a_rank_with_other_values_takes_those_of_the_master(run: Callable[..., Ended]):
    ended = run("""
        if rank == 1:
            with torch.no_grad():
                model[2].weight.fill_(3)
        for i in range(3):
            torch.testing.assert_close(float(step(*batch(i))), eager_step(*batch(i)).item(), rtol=1e-5, atol=1e-6)
        same(model.state_dict(), eager.state_dict())
        print("equal")
    """)
    assert ended.code == 0, ended.text
    assert ended.text.count("equal") == 2
    assert "model.2.weight" in ended.text
    assert "took the master's values" in ended.text


APART = """
    import os
    from pathlib import Path
    from actorflow.session.process import current
    done = Path(__file__).with_name("done")
    if rank == 0:
        os.mkfifo(done)
    flow.place(model, {"": flow.placement("cpu", [0, 1])})
    @flow.global_function
    def quiet(x, y):  # rank 2 has no part in it
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    quiet(*batch(0))
    if rank == 2:
        done.read_text()
        LATE
    for i in range(1, 40):
        quiet(*batch(i))
    if rank == 0:
        current().worker.wait_all()
        done.write_text("")
"""


def test_a_rank_without_a_part_in_a_job_may_stand_still_and_come_later(run: Callable[..., Ended]):
    ended = run(
        APART.replace("LATE", "print('late')")
        + """
    for i in range(40):
        eager_step(*batch(i))
    same(model.state_dict(), eager.state_dict())
    print("equal")
        """,
        3,
    )
    assert ended.code == 0, ended.text
    assert (ended.text.count("late"), ended.text.count("equal")) == (1, 3)


def test_a_rank_without_a_part_that_reads_alone_what_others_have_changed_since_is_told(run: Callable[..., Ended]):
    reads = APART.replace("LATE", "print(model[0].weight.detach().sum())")
    ended = run(reads.replace("range(1, 40)", "range(1, 2)"), 3)  # they have made one call more
    assert ended.code != 0
    assert "model.0.weight was asked for as 1 calls have left it" in ended.text
    assert "read it on every rank, not in a branch of one" in ended.text


def test_what_all_ranks_read_is_what_was_there_however_late_one_of_them_is(run: Callable[..., Ended]):
    ended = run(
        """
        import os
        from pathlib import Path
        ahead = Path(__file__).with_name("ahead")
        if rank == 0:
            os.mkfifo(ahead)
        flow.place(model, {"": flow.placement("cpu", [0, 1])})
        @flow.global_function
        def quiet(x, y):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for i in range(12):
            quiet(*batch(i))
            eager_step(*batch(i))
            if rank == 0 and i % 4 == 2:
                ahead.write_text("")
            if rank == 2 and i % 4 == 1:
                ahead.read_text()  # another rank has made the next call
            same(model.state_dict(), eager.state_dict())
        print("equal")
        """,
        3,
    )
    assert ended.code == 0, ended.text
    assert ended.text.count("equal") == 3


BAD = {
    "another batch size": ("step(*batch(0, 12 + rank))", ["rank 0 made call 1", "float32[12,8]", "float32[13,8]"]),
    "other contents": ("step(*batch(rank))", ["rank 0 made call 1", "rank 1 made call 1", "contents"]),
    "another model": (
        "if rank: model[2] = nn.Linear(16, 5, bias=False)\nstep(*batch(0))",
        ["differs between ranks", "rank 0 has parameter", "rank 1 has"],
    ),
    "another learning mode": (
        "if rank: model.eval()\nstep(*batch(0))",
        ["model: Sequential, training", "model: Sequential, evaluating"],
    ),
    "a branch on data": (
        "@flow.global_function\ndef bad(x, y):\n    if x.sum() > 0:\n        return x\n    return y\nbad(*batch(0))",
        ["if x.sum() > 0:", "captured"],
    ),
    "state loaded on one rank": (
        "step(*batch(0))\nif rank: model.load_state_dict(model.state_dict())\nfloat(step(*batch(0)))",
        ["rank 0 made call 2", "rank 1 is at gather 'a write of model.0.weight', after 1 call"],
    ),
    "another learning rate": (
        "step(*batch(0))\nif rank: optimizer.param_groups[0]['lr'] /= 2\nfloat(step(*batch(0)))",
        ["optimizer.0: lr 0.01,", "optimizer.0: lr 0.005,"],
    ),
    "more calls of a job that exchanges nothing": (
        "flow.place(model, {'': flow.placement('cpu', [1])})\n"
        "@flow.global_function\ndef quiet(x):\n    model(x).sum().backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "for i in range(5 + 20 * rank): quiet(batch(i)[0])",
        ["rank 0 came to the end of its script after 5 calls", "rank 1 made call 6: quiet("],
    ),
    "another job where ranks exchange nothing": (
        "flow.place(model, {'': flow.placement('cpu', [1])})\n"
        "@flow.global_function\ndef quiet(x):\n    model(x).sum().backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "@flow.global_function\ndef other(x):\n    model(x).mean().backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "x, _ = batch(0)\nquiet(x)\nother(x)\n"
        "for i in range(30): (other if rank and i == 3 else quiet)(x)",
        ["rank 0 made call 6: quiet(", "rank 1 made call 6: other("],
    ),
    "more placements than devices": (
        "flow.place(model, {'2': flow.placement('cpu', [2])})\nstep(*batch(0))",
        ["rank 2", "2 devices"],
    ),
}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_ends_the_run_with_an_error_that_says_what_differs(run: Callable[..., Ended], kind: str):
    script, said = BAD[kind]
    ended = run(script)
    assert ended.code != 0
    for text in said:
        assert text in ended.text, ended.text


def test_a_plan_that_is_all_that_is_wanted_ends_the_script_before_it_trains(run: Callable[..., Ended], tmp_path: Path):
    path = tmp_path / "plan_script.py"
    path.write_text(
        HEAD + "predict = flow.global_function(type='predict')(lambda x: model(x))\n"
        "assert torch.equal(predict(batch(0)[0]), eager(batch(0)[0]))\nstep(*batch(0))\nprint('trained')\n"
    )
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", "plan", str(path), "--devices", "4"],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert "trained" not in done.stdout
    assert "rank 3" in done.stdout


def test_ranks_draw_the_numbers_of_the_one_device_script_whatever_their_own_seeds(run: Callable[..., Ended]):
    script = """
        torch.manual_seed(5 + rank)
        drawing = flow.global_function(lambda: torch.rand(3))
        print("torch's seed", [drawing().tolist() for _ in range(2)])
        flow.manual_seed(1)
        print("flow's seed", [drawing().tolist() for _ in range(2)])
    """
    found = [run(script, devices) for devices in (1, 2)]
    assert [ended.code for ended in found] == [0, 0], found
    for words in ("torch's seed", "flow's seed"):
        one, two = ([line for line in ended.text.splitlines() if words in line] for ended in found)
        assert len(two) == 2
        assert {line.partition(words)[2] for line in two} == {one[0].partition(words)[2]}


def test_ranks_that_set_different_seeds_are_told(run: Callable[..., Ended]):
    ended = run("""
        flow.manual_seed(rank + 7)
        flow.global_function(lambda: torch.rand(3))()
    """)
    assert ended.code != 0
    assert "seed 7" in ended.text
    assert "seed 8" in ended.text


def test_ranks_whose_batches_differ_at_a_later_call_say_which_argument_does(run: Callable[..., Ended]):
    ended = run("""
        for i in range(6):
            x, y = batch(i)
            step(x + (rank if i == 4 else 0), y)
        model.state_dict()
    """)
    assert ended.code == 1
    told = re.findall(r"rank (\d) made call 5: .* contents of x (\w+), y (\w+)", ended.text)
    (_, x, y), (_, other, same) = told[:2]
    assert {rank for rank, *_ in told} == {"0", "1"}
    assert x != other
    assert y == same
