"""A link sends signs of life where nothing else is said, and what is queued on it leaves from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from actorflow.control.link import PeerLink
from actorflow_protos import runtime_pb2 as pb
from cluster.ranks import LIMIT

BEAT, STEPS = pb.Item(beat=pb.Beat()), pb.Item(hurry=pb.Hurry())


def said(looks: Callable[[PeerLink, int], None], number: int) -> list[list[str]]:
    """What a link writes at each of some looks of the watch of peers, before which something else may be said."""

    async def run() -> list[list[str]]:
        written: list[str] = []

        async def write(batch: pb.Batch) -> None:
            written.extend(item.WhichOneof("kind") for item in batch.items)

        link = PeerLink(1, asyncio.get_running_loop())
        pumping = asyncio.ensure_future(link.pump(write))
        await asyncio.sleep(0)
        found = []
        for look in range(number):
            looks(link, look)
            link.beat(BEAT)
            while link._queue or link._armed:
                await asyncio.sleep(0)
            found.append([*written])
            written.clear()
        pumping.cancel()
        return found

    return asyncio.run(run())


def test_a_link_at_rest_has_a_sign_of_life_at_every_second_look() -> None:
    assert said(lambda *_: None, 5) == [["beat"], [], ["beat"], [], ["beat"]]


def test_a_link_on_which_anything_is_said_has_no_sign_of_life_until_it_rests() -> None:
    def looks(link: PeerLink, look: int) -> None:
        if look < 3:
            link.put(STEPS)

    assert said(looks, 6) == [["hurry"], ["hurry"], ["hurry"], ["beat"], [], ["beat"]]


def test_what_another_thread_queues_wakes_the_link() -> None:
    async def run() -> str:
        written: asyncio.Queue[str] = asyncio.Queue()

        async def write(batch: pb.Batch) -> None:
            for item in batch.items:
                written.put_nowait(item.WhichOneof("kind"))

        link = PeerLink(1, asyncio.get_running_loop())
        pumping = asyncio.ensure_future(link.pump(write))
        await asyncio.sleep(0)  # it waits for something to write
        other = threading.Thread(target=link.put, args=(STEPS,))
        other.start()
        found = await asyncio.wait_for(written.get(), LIMIT)
        other.join()
        pumping.cancel()
        return found

    assert asyncio.run(run()) == "hurry"
