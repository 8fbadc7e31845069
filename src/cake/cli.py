"""The `cake` command: info, demo, check, bench, plot and convert."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import cake
from cake import bench, check, convert, demo, info, plot


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; `sys.argv[1:]` when None.

    Returns
    -------
    int
        0, or 1 after an error whose message was printed.
    """
    parser = argparse.ArgumentParser(
        prog="cake", description="The routed experts of Kimi-K3 in NVFP4."
    )
    parser.add_argument("--version", action="version", version=f"cake {cake.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info.add_command(commands)
    demo.add_command(commands)
    check.add_command(commands)
    bench.add_command(commands)
    plot.add_command(commands)
    convert.add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"cake {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"cake {arguments.command}: interrupted", file=sys.stderr)
        return 130
