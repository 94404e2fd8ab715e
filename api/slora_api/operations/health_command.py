"""`slora health`: checks whether the server answers or is ready. Container engines and scripts can run it without a
key.
"""

import argparse

from slora_api.cli.remote import check, explained, open_client


@explained
def health(arguments: argparse.Namespace) -> None:
    with open_client({}) as client:
        print(check(client.get("/readyz" if arguments.ready else "/healthz"))["status"])
