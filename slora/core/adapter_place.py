"""Where an adapter is now. The engine sends this value to API processes."""

from enum import StrEnum


class AdapterPlace(StrEnum):
    """The places of an adapter between the store and the pool.

    POOL: loaded; a request can run immediately.
    LOADING: being loaded from the host into the pool.
    HOST: was fetched to the host, where it stays until it is evicted from the host cache.
    FETCHING: being fetched from the store to the host.
    """

    POOL = "pool"
    LOADING = "loading"
    HOST = "host"
    FETCHING = "fetching"
