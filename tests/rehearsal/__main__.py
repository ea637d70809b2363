"""python -m tests.rehearsal [--mib N] [--at-once] [--tell] COMMAND ...: run it on the simulated device."""

from __future__ import annotations

import argparse
import os
import sys

from tests import rehearsal
from tests.rehearsal.device import environment


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rehearsal",
        description=rehearsal.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mib", type=int, default=8192, help="memory of the device [default: 8192]")
    parser.add_argument(
        "--at-once", action="store_true", help="do work when it is enqueued, not when a caller waits for it"
    )
    parser.add_argument("--tell", action="store_true", help="write each error of the device to stderr, in words")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if not asked.command:
        parser.error("a command is wanted, e.g. ./run gpu --device cuda --stage graph")
    if "--keep" in asked.command:
        parser.error("--keep: measurements of this device are not stored")
    found = environment(asked.mib << 20, late=not asked.at_once, tells=asked.tell)
    sys.stdout.flush()
    os.execvpe(asked.command[0], asked.command, found)


if __name__ == "__main__":
    main()
