"""Child processes in which candidates are loaded, and shared memory in which tensors travel to them."""

from autosel.workers.arena import Arena, Arenas, Ref
from autosel.workers.process import Exit, Limits, RaisedError, Worker

__all__ = ["Arena", "Arenas", "Exit", "Limits", "RaisedError", "Ref", "Worker"]
