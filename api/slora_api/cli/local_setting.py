"""Settings of the server, for commands that work on its data without a server."""

import argparse
import os

__all__ = ["read_local_setting"]


def read_local_setting(arguments: argparse.Namespace, name: str) -> str:
    """Returns a flag or the environment variable of the setting of the same name; empty if neither is set."""
    return getattr(arguments, name) or os.environ.get(f"SLORA_{name.upper()}", "")
