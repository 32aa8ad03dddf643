"""Forward frames between two network cards, with a given delay and loss.

python cable.py CARD CARD SECONDS FRACTION

A cable of its own for kernels without the scheduler "netem": the cards are TAP devices, made here, which the caller
then moves to where they belong.  Prints a line when they are there; ends when its input does.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000


def card(name):
    """The descriptor of a new TAP device."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def frames(fd):
    """What has come; nothing while the card is not up."""
    while True:
        try:
            yield os.read(fd, 65536)
        except OSError:
            return


def main(first, second, seconds, fraction):
    ends = [card(first), card(second)]
    other = dict(zip(ends, reversed(ends), strict=True))
    drawn = random.Random(0)
    under_way = []  # (when it arrives, number, where, frame)
    number = 0
    print("ready", flush=True)
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([sys.stdin, *ends], [], [], patience)
        if sys.stdin in ready:
            return
        for fd in ready:
            for frame in frames(fd):
                if drawn.random() >= fraction:
                    number += 1
                    heapq.heappush(under_way, (time.monotonic() + seconds, number, other[fd], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, fd, frame = heapq.heappop(under_way)
            try:
                os.write(fd, frame)
            except OSError:  # the card is down, or full: a real one loses the frame, too
                continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
