"""Ends as its first argument says; says what it sees of itself. One process."""

from __future__ import annotations

import atexit
import pickle
import sys

VALUE = ["global"]


class Thing:
    pass


def last_words() -> None:
    print("atexit", VALUE, type(sys.modules["__main__"]).__name__, getattr(sys, "last_type", None), flush=True)


if __name__ == "__main__":
    atexit.register(last_words)
    print(sys.argv[1:], __name__, __spec__ is None, type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    print(sys.path[0] == __file__.rpartition("/")[0], sys.modules["__main__"].VALUE is VALUE)
    if sys.argv[1] == "raise":
        raise KeyError("an uncaught one")
    if sys.argv[1] == "exit":
        sys.exit(int(sys.argv[2]))
    if sys.argv[1] == "text":
        sys.exit("a reason")
