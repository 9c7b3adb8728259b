"""The command `dflash-pipe`, also as `python -m dflash_pipe`. Ctrl-C while Python still imports it ends it at once."""

from __future__ import annotations

from importlib import import_module

from dflash_pipe.signals import leaving

__all__ = ["enter", "main"]


def enter(module: str) -> None:
    """Import a command's module, which may take seconds, and call its `main`."""
    with leaving():
        command = import_module(module).main
    command()


def main() -> None:
    """Entry point; the exit codes are those of `dflash_pipe.cli`."""
    enter("dflash_pipe.cli")


if __name__ == "__main__":
    main()
