"""Reads server settings for commands that work on the server's data directly."""

import argparse
import os


def read_local_setting(arguments: argparse.Namespace, name: str) -> str:
    """Returns the value of a server setting from its flag, or else from its environment variable; empty if neither is
    set.
    """
    return getattr(arguments, name) or os.environ.get(f"SLORA_{name.upper()}", "")
