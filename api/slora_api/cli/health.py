"""`slora health`: checks for container engines and scripts whether the server answers or is ready. It needs no key."""

import argparse

from slora_api.cli.remote import check, explained, open_client

__all__ = ["health"]


@explained
def health(arguments: argparse.Namespace) -> None:
    with open_client({}) as client:
        print(check(client.get("/readyz" if arguments.ready else "/healthz"))["status"])
