"""Stream events to readers (server-sent events). A reader that falls behind is disconnected, so memory stays
bounded."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from autosel.ledger.faults import plain
from autosel.values import to_json

KEPT = 256  # events kept for a reader that reconnects
BEHIND = 256
BEAT_S = 15.0
MOST_READERS = 48


class Events:
    """Distribute events. Only for the event loop's thread."""

    def __init__(self) -> None:
        self._past: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self._last = 0
        self.closed = False

    @property
    def readers(self) -> int:
        return len(self._readers)

    def tell(self, kind: str, value: Any) -> None:
        self._last += 1
        text = json.dumps(plain(to_json(value)), separators=(",", ":"))
        block = f"id: {self._last}\nevent: {kind}\ndata: {text}\n\n".encode()
        self._past.append((self._last, block))
        for reader in list(self._readers):
            try:
                reader.put_nowait(block)
            except asyncio.QueueFull:
                self._end(reader)

    async def follow(self, after: int | None = None) -> AsyncIterator[bytes]:
        """Yield events from now on; `after` (an event's number) first returns the later ones that are still kept."""
        line: asyncio.Queue[bytes | None] = asyncio.Queue(BEHIND)
        self._readers.add(line)
        try:
            yield b"retry: 2000\n\n"
            for number, block in list(self._past) if after is not None else ():
                if after is not None and number > after:
                    yield block
            while not self.closed:
                try:
                    async with asyncio.timeout(BEAT_S):
                        found = await line.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if found is None:
                    return
                yield found
        finally:
            self._readers.discard(line)

    def close(self) -> None:
        """End every line, so that the daemon can stop."""
        self.closed = True
        for reader in list(self._readers):
            self._end(reader)

    def _end(self, reader: asyncio.Queue[bytes | None]) -> None:
        self._readers.discard(reader)
        while not reader.empty():
            reader.get_nowait()
        reader.put_nowait(None)
