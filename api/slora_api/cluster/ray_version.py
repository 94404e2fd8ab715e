"""Which versions of Ray this release works with. Ray's API of request routers is alpha, so any other may differ."""

from slora.core.errors import ConfigError

_SERIES = "2.60"


def check_ray_version(version: str) -> None:
    """Raises ConfigError for a Ray that is too old or too new."""
    if version.split(".")[:2] != _SERIES.split("."):
        raise ConfigError(
            f"Ray {version} is installed, but this release needs Ray {_SERIES}: run pip install 'slora[ray]' on every "
            "host of the cluster"
        )
