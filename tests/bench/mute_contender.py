"""A contender that is ready, and ends as soon as it is asked for anything."""

import json
import sys

if __name__ == "__main__":
    sys.stdin.readline()
    print(json.dumps({"version": "mute 1"}), flush=True)
    sys.stdin.readline()
