"""The settings of a cluster that Ray runs, beside those of its servers: where the replicas run, and how many.

They have flags and environment variables, as the settings of a server have, and may also be in a cluster file.
"""

from dataclasses import dataclass

from slora.core.setting import Auto, OnOff, Seconds, SettingSpec, Whole, setting, setting_specs


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The smallest number of replicas, `replicas`, is a setting of the server."""

    cluster_name: str = setting("slora", "name of the cluster within Ray", metavar="NAME")
    ray_address: str = setting(
        "auto", "HOST:PORT of Ray's head (its GCS); auto takes the Ray of this host", metavar="ADDRESS"
    )
    secret_file: str = setting(
        "", "file with the secret that connections to engines prove to know; every host with API processes needs the "
        "same file (default: cluster-secret in the data directory)", metavar="PATH",
    )  # fmt: skip
    max_replicas: int | None = setting(
        None, "largest number of replicas, to which Ray scales up under load; replicas is then the smallest number. "
        "auto: replicas is the number", Auto(Whole(1, 1024)), metavar="N",
    )  # fmt: skip
    scale_seconds: float = setting(
        30.0, "how long the load must ask for more replicas before they are started; for fewer replicas, it must ask "
        "20 times as long", Seconds(), metavar="SECONDS",
    )  # fmt: skip
    surge: bool = setting(
        True, "whether an upgrade starts a new replica before it drains an old one, which needs room for one more "
        "replica: on or off", OnOff(),
    )  # fmt: skip


def cluster_setting_specs() -> tuple[SettingSpec, ...]:
    return setting_specs(ClusterSettings)
