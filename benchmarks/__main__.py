"""`python -m benchmarks`: the commands are in `benchmarks.commands`."""

from dflash_pipe.__main__ import enter

if __name__ == "__main__":
    enter("benchmarks.commands")
