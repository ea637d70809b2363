"""All errors, in one class tree. Each states what happened, the values, and what to do.

An error knows its exit code (1 failure, 2 usage, 3 a comparison came out worse, 4 parity, 5 too noisy, 6 environment),
so that the CLI never guesses. Raise these for the caller's mistakes; `assert` is for autosel's own.
"""

from __future__ import annotations

from typing import Any

MOST_CHARACTERS = 3000  # of one part of a message, readable by a person


def clear(text: str) -> str:
    """Make text printable: values often come from others, so control characters are escaped and long texts cut."""
    if not text.isprintable():
        text = text.expandtabs(4)
        text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."


class AutoselError(Exception):
    """The base class. Its message has separate lines for what happened, why (the values), and what to do."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", todo: str = "") -> None:
        self.what, self.why, self.todo = clear(what), clear(why), clear(todo)
        what, why, todo = self.what, self.why, self.todo
        super().__init__("\n".join(line for line in (what, why, todo) if line))


# --- impossible requests ---------------------------------------------------------------------------------------------


class UsageError(AutoselError):
    """An impossible request: options that exclude each other, a workload that nothing can run, a missing package."""

    exit_code = 2


class UnknownName(UsageError):
    """An unknown op, model, dtype, device or candidate, with the nearest known names."""

    def __init__(self, kind: str, name: str, known: tuple[str, ...]) -> None:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=2, cutoff=0.5)
        todo = f"did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}", why=f"known: {', '.join(known)}", todo=todo)
        self.kind, self.name, self.known = kind, name, known


class BadConfig(UsageError):
    """A settings file, model config or import file that cannot be read or parsed."""


class BadArguments(UsageError):
    """Tensors or scalars that do not fit any workload of the op."""


class IncompleteContract(AutoselError):
    """An op declares no domain for some of its dimensions, traits or arguments, which would never be tested."""

    def __init__(self, op: str, missing: list[str]) -> None:
        names = ", ".join(missing)
        todo = f"add {names} to `domains`, each with at least two values (autosel/ops/domains.py)"
        super().__init__(f"{op} declares no domain for {names}", todo=todo)


# --- building and running candidates ---------------------------------------------------------------------------------


class BuildError(AutoselError):
    """A compiler refused a source, or there is no compiler. `log` is the compiler's output."""

    def __init__(self, what: str, *, why: str = "", todo: str = "", log: str = "") -> None:
        super().__init__(what, why=why, todo=todo)
        self.log = log


class WorkerError(AutoselError):
    """A worker process did not give a complete reply: it died, hung, or sent something else."""

    def __init__(self, what: str, *, cause: str, why: str = "", todo: str = "", retryable: bool = False) -> None:
        super().__init__(what, why=why, todo=todo)
        self.cause, self.retryable = cause, retryable


class DeviceFault(AutoselError):
    """A kernel did not end normally: its watchdog stopped it, or the device refused it. `arm` (an Arm) of `op`."""

    def __init__(self, what: str, *, arm: Any, op: str, why: str = "", todo: str = "") -> None:
        super().__init__(what, why=why, todo=todo)
        self.arm, self.op = arm, op


class EnvironmentFault(AutoselError):
    """PyTorch, the compiler or a worker process does not work here: the environment fails, not a candidate.

    Nothing was recorded against any candidate.
    """

    exit_code = 6

    def __init__(self, what: str, *, why: str = "", todo: str = "") -> None:
        why = "\n".join(filter(None, (why, "nothing was recorded against any candidate")))
        super().__init__(f"the environment is broken: {what}", why=why, todo=todo)


class ParityError(AutoselError):
    """A wrong result: a candidate's in its proof or its race, or the tokens or logits of a run."""

    exit_code = 4


class TooNoisy(AutoselError):
    """An undecided result: the machine is too noisy, or the budget ended. Earlier decisions are kept."""

    exit_code = 5


class Stopped(AutoselError):
    """Stopped by Ctrl-C."""

    exit_code = 130


def out_of_memory(error: BaseException) -> AutoselError | None:
    """Return autosel's error for an out-of-memory error, else None.

    PyTorch has an error type for a GPU; for a CPU only the text tells.
    """
    text = str(error)
    told = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    if not (told or isinstance(error, MemoryError)):
        return None
    return AutoselError(
        "not enough memory: it ran out during the work",
        why=text.partition("\n")[0][:200],
        todo="use a smaller model, batch or context; everything acknowledged is safe",
    )


# --- the ledger ------------------------------------------------------------------------------------------------------


class LedgerError(AutoselError):
    """The ledger or its snapshot cannot be used: locked, read-only, corrupt, full, of another version.

    A failed transaction changed nothing.
    """


class ForeignDecision(AutoselError):
    """A frozen lock file cannot be kept here: its decisions are for another device or other libraries, or it is
    missing.
    """
