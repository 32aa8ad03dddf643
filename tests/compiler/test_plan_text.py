"""The text of a plan made by hand: a person finds every fact of every actor in its block."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.plan.plan import (
    SUM,
    Actor,
    Body,
    Collective,
    CollectiveKind,
    Combine,
    CombineKind,
    FromRegister,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Order,
    Plan,
    Read,
    Register,
    Send,
    Step,
    Summary,
    TensorSpec,
    ToResult,
    Variable,
)
from actorflow_compiler.plan.summary import summarise
from actorflow_compiler.plan.text import to_text
from actorflow_compiler.plan.verify import verify

PIECES = 4


def two_stages() -> Plan:
    """Ranks 0 and 1 compute the same stage and all-reduce; rank 1 sends its activation to rank 2."""
    x = TensorSpec((8, 16), "float32", "S(0)", name="x")
    h = TensorSpec((1024, 384), "float32", "S(0)", Combine(CombineKind.CAT, 0), "h")
    mask = TensorSpec((8,), "bool", "B", name="mask")
    total = TensorSpec((), "float32", "P", SUM, "total")
    add = Step("aten.add.Tensor", (), (), (0,))
    weight, count = OfVariable("fc.weight"), OfVariable("count")
    pair = Collective(CollectiveKind.ALL_REDUCE, 7, (0, 1), plane="gloo")
    actors = [
        Actor(0, "source@1", 1, "source", "source", 1, None, (OfInput("tokens"),), (FromRegister(0, 0),)),
        Actor(1, "F0@1", 1, "compute", "forward", PIECES, 0,
              (FromRegister(0, 0), weight, OfPiece()),
              (FromRegister(1, 0), FromRegister(1, 1), FromRegister(3, 0)), flops=2.5e9),
        Actor(2, "send0@1>2", 1, "send:2", "send", PIECES, None, (FromRegister(1, 0), FromRegister(1, 1)),
              (FromRegister(2, 0), FromRegister(2, 1)), Send(3, 1, 2, plane="inline")),
        Actor(3, "F1@2", 2, "compute", "forward", PIECES, None, stage=1),
        Actor(4, "reduce@1", 1, "comm", "boxing", 1, None, (FromRegister(3, 0),), (FromRegister(4, 0),), pair),
        Actor(5, "O@1", 1, "compute", "optimizer", 1, 1, (FromRegister(4, 0), OfScalar("lr")), (weight,)),
        Actor(6, "loss@1", 1, "sink", "sink", 1, None, (FromRegister(4, 0),), (ToResult(0),)),
        Actor(7, "reduce@0", 0, "comm", "boxing", 1, None, (count,), (count,), pair),
    ]  # fmt: skip
    registers = [
        Register(0, 0, (Read(1, PIECES),), (x,), slots=2),
        Register(1, 1, (Read(2),), (h, mask), slots=1),
        Register(2, 2, (Read(3),), (h, mask), slots=3),
        Register(3, 1, (Read(4),), (total,), fill=PIECES),
        Register(4, 4, (Read(5), Read(6)), (total,)),
        Register(5, 5, (Read(1, PIECES),), (), initial=1),
    ]
    order = (Order(1, "compute", (1, 1, 1, 1, 5)), Order(1, "send:2", (2,) * PIECES), Order(1, "comm", (4,)))
    orders = (
        *order,
        Order(1, "source", (0,)),
        Order(1, "sink", (6,)),
        Order(2, "compute", (3,) * PIECES),
        Order(0, "comm", (7,)),
    )
    bodies = (Body(3, (add,) * 2, (0, 1, 2)), Body(2, (add,), (0,)))
    both = Variable("fc.weight", (16, 16), "float32", placement("cpu", [0, 1]), (Split(0),), "parameter")
    alone = Variable("count", (), "float32", placement("cpu", [0]), (B,), "buffer")
    notes = ("dropout is packed: aten.native_dropout cannot be split in time",)
    plan = Plan("train_step", 3, PIECES, bodies, tuple(actors), tuple(registers), (both, alone), (), orders, (), notes)
    return summarise(verify(replace(plan, summary=Summary(flops=3.2e12, redundant_flops=0.03125))))


@pytest.fixture(scope="module")
def text() -> str:
    return to_text(two_stages())


def block(text: str, actor: str) -> str:
    """What the text says of one actor."""
    found = re.search(rf"^  #\d+ {re.escape(actor)}: .*?(?=^\s*$|^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{actor} is not in the text"
    return found[0]


def row(block: str, label: str) -> str:
    """One labelled part of an actor's block, on one line."""
    found = re.search(rf"^    {label}\b.*?(?=^    \w|\Z)", block, re.MULTILINE | re.DOTALL)
    assert found, f"{label} is not in {block}"
    return " ".join(found[0].split())


def test_the_text_opens_with_the_summary(text: str) -> None:
    head = text[: text.index("\nrank 0")]
    assert head.startswith("plan train_step: 3 ranks, 4 micro-batches in an iteration\n\nsummary\n")
    words = " ".join(head.split())
    assert "stages 0 cpu:[1] 1 cpu:[2]" in words
    assert "actors 8: 1 source, 2 forward, 1 send, 2 boxing, 1 optimizer, 1 sink" in words
    assert "3.20 TFLOP useful in an iteration; 3.12% of all are done redundantly" in words
    assert "rank parameters optimizer activations total" in words
    assert "0 516 B 0 B 0 B 516 B 1 512 B 0 B 1.5 MiB 1.5 MiB" in words
    assert "2 0 B 0 B 4.5 MiB 4.5 MiB" in words
    assert "moved all_reduce 8 B send 6.0 MiB" in words
    assert "notes dropout is packed: aten.native_dropout cannot be split in time" in words


def test_ranks_follow_in_order_each_with_its_own_actors(text: str) -> None:
    assert re.findall(r"^rank (\d): (\d) actors?", text, re.MULTILINE) == [("0", "1"), ("1", "6"), ("2", "1")]
    assert text.index("rank 1:") < text.index("F0@1: ") < text.index("rank 2:") < text.index("F1@2: ")
    assert "rank 1: 6 actors, messages with rank 2" in text
    assert "rank 0: 1 actor, no messages with other ranks" in text


def test_a_queue_shows_its_order_with_repetitions_folded(text: str) -> None:
    assert re.search(r"^  compute +F0@1×4 O@1$", text, re.MULTILINE)
    assert re.search(r"^  send:2 +send0@1>2×4$", text, re.MULTILINE)


def test_an_actor_shows_its_kind_queue_stage_rate_turns_and_work(text: str) -> None:
    head = block(text, "F0@1").splitlines()[0]
    assert head == "  #1 F0@1: forward, queue compute, stage 0, 4 firings (turns 0-3 of 5), 2 ops, 2.50 GFLOP a firing"
    assert "queue compute, stage 0, 1 firing (turn 4 of 5), 1 op" in block(text, "O@1")


def test_a_register_shows_slots_shape_dtype_sbp_and_bytes(text: str) -> None:
    reads = row(block(text, "F0@1"), "reads")
    assert "r0 2 slots of 512 B, a token is held for 4 firings, from source@1 float32[8,16] S(0) 512 B x" in reads
    assert "r5 1 slot, order only, 1 initial token, a token is held for 4 firings, from O@1" in reads
    writes = row(block(text, "F0@1"), "writes")
    assert "r1 1 slot of 1.5 MiB, to send0@1>2" in writes
    assert "float32[1024,384] S(0) 1.5 MiB h (cat:0)" in writes
    assert "bool[8] B 8 B mask" in writes
    assert "r3 1 slot of 4 B, 4 firings of the producer fill a token, to reduce@1 float32[] P 4 B total (sum)" in writes


def test_a_register_on_another_rank_says_so_and_is_read_there(text: str) -> None:
    assert "r2 3 slots of 1.5 MiB, to F1@2 on rank 2" in row(block(text, "send0@1>2"), "writes")
    assert "r2 3 slots of 1.5 MiB, from send0@1>2" in row(block(text, "F1@2"), "reads")


def test_an_actor_names_its_peers_with_their_ranks(text: str) -> None:
    assert row(block(text, "F0@1"), "peers") == "peers rank 1: source@1, O@1, send0@1>2, reduce@1"
    assert row(block(text, "send0@1>2"), "peers") == "peers rank 1: F0@1; rank 2: F1@2"
    assert row(block(text, "F1@2"), "peers") == "peers rank 1: send0@1>2"
    assert row(block(text, "reduce@1"), "peers") == "peers rank 0: reduce@0; rank 1: F0@1, O@1, loss@1"


def test_a_communication_shows_its_group_and_its_plane(text: str) -> None:
    assert row(block(text, "reduce@0"), "comm") == "comm all_reduce 7 among ranks 0, 1, gloo"
    assert row(block(text, "send0@1>2"), "comm") == "comm send 3 from rank 1 to rank 2, inline"


def test_what_is_no_register_is_named_too(text: str) -> None:
    assert row(block(text, "F0@1"), "takes") == "takes variable fc.weight, piece number"
    assert row(block(text, "O@1"), "takes") == "takes scalar lr"
    assert row(block(text, "O@1"), "gives") == "gives variable fc.weight"
    assert row(block(text, "source@1"), "takes") == "takes input tokens"
    assert row(block(text, "loss@1"), "gives") == "gives result 0"


def test_variables_show_their_layout(text: str) -> None:
    assert re.search(r"^  fc\.weight +parameter +float32\[16,16\] +S\(0\) +cpu:\[0,1\]$", text, re.MULTILINE)
    assert re.search(r"^  count +buffer +float32\[\] +B +cpu:\[0\]$", text, re.MULTILINE)


def test_tensor_columns_are_aligned_over_the_whole_plan(text: str) -> None:
    starts = {line.index(" S(0)") for line in text.splitlines() if " S(0)" in line and "parameter" not in line}
    assert len(starts) == 1


def test_no_line_of_words_is_wider_than_the_page() -> None:
    plan = two_stages()
    text = to_text(replace(plan, notes=("word " * 90,)))
    assert max(map(len, text.splitlines())) <= 120


def test_orders_that_are_not_frozen_say_so() -> None:
    text = to_text(replace(two_stages(), orders=()))
    assert re.search(r"^  compute +not frozen yet$", text, re.MULTILINE)
    assert "4 firings, 2 ops" in text


def test_actors_of_one_name_are_told_apart_by_number() -> None:
    plan = two_stages()
    same = tuple(replace(a, name="reduce") if "reduce" in a.name else a for a in plan.actors)
    text = to_text(replace(plan, actors=same))
    assert "rank 0: reduce#7; rank 1: F0@1, O@1, loss@1" in text


def test_a_part_of_a_plan_shows_its_rank_alone() -> None:
    plan = two_stages()
    text = to_text(plan.for_rank(2))
    assert re.findall(r"^rank (\d)", text, re.MULTILINE) == ["2"]
    assert row(block(text, "F1@2"), "peers") == "peers rank 1: send0@1>2"
    for rank in (0, 1):
        assert f"rank {rank}: " in to_text(plan.for_rank(rank))


@pytest.mark.parametrize(
    ("actors", "shown"),
    [
        ("0 0 0 1 0 1 0 1 1 1 2", "F×3 (B F)×2 B×3 O"),
        ("0 1 2", "F B O"),
        ("0 1 0 1 0 1", "(F B)×3"),
        ("0 0 1 0 0 1 2", "(F×2 B)×2 O"),
        ("0 1 1 0", "F B×2 F"),
    ],
)
def test_an_order_unfolds_to_what_it_was(actors: str, shown: str) -> None:
    ids = tuple(map(int, actors.split()))
    names = "FBO"
    made = tuple(Actor(i, names[i], 0, "compute", "forward", ids.count(i)) for i in sorted(set(ids)))
    text = to_text(Plan("p", 1, 1, (), made, (), orders=(Order(0, "compute", ids),)))
    found = re.search(r"^  compute +(.*)$", text, re.MULTILINE)
    assert found
    assert found[1] == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(size: int, shown: str) -> None:
    actors = (Actor(0, "a", 0, "compute", "forward"), Actor(1, "b", 0, "compute", "forward"))
    register = Register(0, 0, (Read(1),), (TensorSpec((size,), "uint8", str(B)),))
    assert f"r0  1 slot of {shown}, from a" in to_text(Plan("p", 1, 1, (), actors, (register,)))


def test_a_source_shows_which_rows_of_an_argument_it_takes() -> None:
    plan = two_stages()
    steps = [Step("actorflow.carve", (Ref(0), (start, 0), (32, 16)), (), (4 + i,)) for i, start in enumerate((0, 64))]
    cut = (Step("actorflow.carve", (Ref(at), (start,), (1,)), (), (out,)) for at, start, out in ((1, 5, 6), (3, 96, 7)))
    taking = Body(4, (*steps, *cut), (4, 5, 6, 7, 2))
    taken = tuple(map(OfInput, ("images", "weights", "mask", "images")))
    source = replace(plan.actors[0], body=len(plan.bodies), operands=taken)
    text = to_text(replace(plan, bodies=(*plan.bodies, taking), actors=(source, *plan.actors[1:])))
    assert row(block(text, "source@1"), "takes") == (
        "takes rows 0-31,64-96 of images, row 5 of weights, input mask, rows 0-31,64-96 of images"
    )
