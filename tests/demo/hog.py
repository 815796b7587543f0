"""A neighbour that does nothing but burn the CPU it is pinned to."""

from __future__ import annotations

from tests.demo.procs import set_name

NAME = "whyspan-hog"


def main() -> None:
    set_name(NAME)
    number = 0
    while True:
        number = (number * 1103515245 + 12345) & 0x7FFFFFFF


if __name__ == "__main__":
    main()
