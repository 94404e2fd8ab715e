"""How near an adapter is to the next request for it. Crosses to API processes."""

from enum import StrEnum


class AdapterPlace(StrEnum):
    """POOL: a request can start at once. LOADING: on its way there from the host. HOST: it came to the host, where it
    stays until its room is wanted. FETCHING: on its way there from the store.
    """

    POOL = "pool"
    LOADING = "loading"
    HOST = "host"
    FETCHING = "fetching"
