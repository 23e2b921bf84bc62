"""What a forked child must not inherit: locks held by threads that it does not have, sockets, the run's lock.

A data loader's workers are such children. They never serve the port, never hold the run, and never wait for ever.
"""

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something of this process that a forked child gets a copy of."""

    def let_go(self) -> None:
        """Called in the child, right after the fork: give up the copy; the parent's own stays as it is."""
        ...


_inherited: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def let_go_in_children(inherited: Inherited) -> None:
    """Have `inherited.let_go()` called in every child that is forked from now on, for as long as it lives."""
    _inherited.add(inherited)


def _let_go() -> None:
    for inherited in list(_inherited):
        inherited.let_go()


# Once, here: a hook on fork cannot be taken back, and does nothing while nobody has asked.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
