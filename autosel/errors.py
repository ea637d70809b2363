"""One tree of errors. Each says what happened, the values seen, and what to do next.

An error knows its exit code (1 failure, 2 usage, 3 a comparison came out worse, 4 parity, 5 too noisy, 6 environment),
so that the CLI never has to guess. Raise these for the caller's mistakes; `assert` is for ours.
"""

from __future__ import annotations

from typing import Any

MOST_CHARACTERS = 3000  # of one part of a message: what a person reads


def clear(text: str) -> str:
    """Values seen are often somebody else's text: nothing in a message that a terminal would obey, nor without end."""
    if not text.isprintable():
        text = text.expandtabs(4)
        text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."


class AutoselError(Exception):
    """What went wrong, then why (values seen), then what to do: each a line of its own."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", todo: str = "") -> None:
        self.what, self.why, self.todo = clear(what), clear(why), clear(todo)
        what, why, todo = self.what, self.why, self.todo
        super().__init__("\n".join(line for line in (what, why, todo) if line))


# --- the caller asked for something that does not exist or cannot be -------------------------------------------------


class UsageError(AutoselError):
    """Something was asked for that cannot be: options that exclude each other, a workload that nothing can run, a
    package that is not installed."""

    exit_code = 2


class UnknownName(UsageError):
    """An op, model, dtype, device or candidate nobody has heard of; carries the nearest known names."""

    def __init__(self, kind: str, name: str, known: tuple[str, ...]) -> None:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=2, cutoff=0.5)
        todo = f"did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}", why=f"known: {', '.join(known)}", todo=todo)
        self.kind, self.name, self.known = kind, name, known


class BadConfig(UsageError):
    """A settings file, model config or import file that cannot be understood."""


class BadArguments(UsageError):
    """Tensors or scalars that no workload of the op describes."""


class IncompleteContract(AutoselError):
    """An op declares no domain for some of its dimensions, traits or arguments: they would never be tested."""

    def __init__(self, op: str, missing: list[str]) -> None:
        names = ", ".join(missing)
        todo = f"add {names} to `domains`, each with at least two values (autosel/ops/domains.py)"
        super().__init__(f"{op} declares no domain for {names}", todo=todo)


# --- building and running candidates ---------------------------------------------------------------------------------


class BuildError(AutoselError):
    """A compiler refused a source, or there is no compiler. `log` holds what it printed."""

    def __init__(self, what: str, *, why: str = "", todo: str = "", log: str = "") -> None:
        super().__init__(what, why=why, todo=todo)
        self.log = log


class WorkerError(AutoselError):
    """A worker process did not give the whole reply: it died, hung, or said something that is not a reply."""

    def __init__(self, what: str, *, cause: str, why: str = "", todo: str = "", retryable: bool = False) -> None:
        super().__init__(what, why=why, todo=todo)
        self.cause, self.retryable = cause, retryable


class DeviceFault(AutoselError):
    """A kernel did not end as it should: its watchdog stopped it, or the device refused it. `arm` (an Arm) of `op`."""

    def __init__(self, what: str, *, arm: Any, op: str, why: str = "", todo: str = "") -> None:
        super().__init__(what, why=why, todo=todo)
        self.arm, self.op = arm, op


class EnvironmentFault(AutoselError):
    """PyTorch, the compiler or a worker process does not work here: the environment fails, not a candidate. Nothing
    was recorded against any candidate."""

    exit_code = 6

    def __init__(self, what: str, *, why: str = "", todo: str = "") -> None:
        why = "\n".join(filter(None, (why, "nothing was recorded against any candidate")))
        super().__init__(f"the environment is broken: {what}", why=why, todo=todo)


class ParityError(AutoselError):
    """A result is wrong: a candidate's in its proof or its race, or the tokens or logits of a run."""

    exit_code = 4


class TooNoisy(AutoselError):
    """Nothing was decided: the machine is too noisy, or the budget ended. What was decided before is kept."""

    exit_code = 5


class Stopped(AutoselError):
    """Ctrl-C: nobody's mistake."""

    exit_code = 130


def out_of_memory(error: BaseException) -> AutoselError | None:
    """Return the error in our words where memory ran out. PyTorch has a type for a GPU's; of a CPU's only the text
    tells."""
    text = str(error)
    told = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    if not (told or isinstance(error, MemoryError)):
        return None
    return AutoselError(
        "not enough memory: it ran out on the way",
        why=text.partition("\n")[0][:200],
        todo="use a smaller model, batch or context; everything acknowledged is safe",
    )


# --- the ledger ------------------------------------------------------------------------------------------------------


class LedgerError(AutoselError):
    """The ledger or its snapshot cannot be used: locked, read-only, corrupt, full, of another version. A transaction
    that failed changed nothing."""


class ForeignDecision(AutoselError):
    """A frozen lock file cannot be kept here: its decisions are of another device or other libraries, or it is gone."""
