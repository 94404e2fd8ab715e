"""A contender that is ready, and ends as soon as it is asked for anything. Its version is its process id."""

import json
import os
import sys

if __name__ == "__main__":
    sys.stdin.readline()
    print(json.dumps({"version": str(os.getpid())}), flush=True)
    sys.stdin.readline()
