"""Parses the URL of a database, the value of `--database`."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

__all__ = ["label_database", "parse_database_url"]

_POSTGRESQL = ("postgresql", "postgresql+psycopg")


def parse_database_url(text: str) -> URL:
    """Parses postgresql://USER:PASSWORD@HOST/NAME, sqlite:///PATH, or a path of a SQLite file. Raises ValueError for
    any other string, or if the package of the database is not installed. The message contains no password.
    """
    if "://" not in text:
        return URL.create("sqlite", database=str(Path(text)))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ValueError("the database is not a URL such as postgresql://USER:PASSWORD@HOST/NAME") from None
    if url.drivername in _POSTGRESQL:
        try:
            version("psycopg")
        except PackageNotFoundError:
            raise ValueError(
                "a postgresql:// database needs the package psycopg: pip install 'slora[postgresql]'"
            ) from None
        return url.set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite" and url.database:
        return url
    raise ValueError(
        f"a database is a file, sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME, not {url.drivername}://"
    )


def label_database(url: URL) -> str:
    """Returns the name of a database for messages, without a password."""
    return repr(
        url.database if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
    )
