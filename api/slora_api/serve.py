"""`slora serve`: the composition root. Everything that a server consists of is made here, once, and taken down here.

Order of life: data directory and its lock, secrets, database, adapters, then the child processes, then HTTP. The
socket is open before the engine is ready (/readyz says so), and is the first thing to close at the end.
"""
