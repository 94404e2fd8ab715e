"""The audit log: one entry for each change of the control plane, with the actor, the address and the time.

An entry is written in the transaction of its change, so either both are committed or neither is. That transaction holds
the lock CHANGES, so the ids of entries are in commit order. Entries hold no secrets.

Only the code that begins a change, such as an HTTP handler, knows the actor. It calls `acting_as`, which sets the actor
for all code in the block. Without `acting_as`, the actor is the server itself.
"""

import getpass
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.database.database import Database


class ActorKind(StrEnum):
    """The kind of an actor. COMMAND is a `slora` command that changes the database directly. SERVER is work of a server
    without a request.
    """

    OPERATOR = "operator"
    TENANT = "tenant"
    COMMAND = "command"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Actor:
    """The person or program that makes a change."""

    kind: ActorKind
    name: str = ""  # the id of an API key, or the user name under which a command runs
    address: str = ""  # the client's IP address, or the host on which a command runs
    request_id: str = ""  # the value of the response header `x-request-id`


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry of the audit log."""

    entry_id: int
    created_at: float
    actor: Actor
    action: str  # such as `tenant.create`
    tenant: str
    target: str  # the id or name of the changed object, such as a key id or an adapter name
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Selects the entries to read. A field that is None matches every entry."""

    tenant: str | None = None
    actor: str | None = None
    action: str | None = None  # an action, or its first part, such as `tenant`
    since: float | None = None  # Unix time
    until: float | None = None  # Unix time, exclusive


_SERVER = Actor(ActorKind.SERVER)
_actor: ContextVar[Actor] = ContextVar("actor", default=_SERVER)
_c = schema.audit_log.c
_ENTRIES = select(
    *(_c.entry_id, _c.created_at, _c.actor_kind, _c.actor, _c.address, _c.request_id),
    *(_c.action, _c.tenant, _c.target, _c.details),
).order_by(_c.entry_id.desc())


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Sets the actor of all changes in the block, including changes in tasks and threads that asyncio starts there."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def current_actor() -> Actor:
    return _actor.get()


def command_actor() -> Actor:
    """Returns the actor for a `slora` command that changes the database directly."""
    return Actor(ActorKind.COMMAND, _find_user_name(), socket.gethostname())


def _find_user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # This machine does not know the user, as in a container with any user id.
        return f"uid {os.getuid()}"


def record_change(
    connection: Connection,
    action: str,
    tenant: str,
    target: str = "",
    details: Mapping[str, Any] | None = None,
    actor: Actor | None = None,
) -> None:
    """Adds an entry. The transaction of `connection` must hold the lock CHANGES. actor: None for the current actor."""
    actor = actor or current_actor()
    row = {
        "created_at": time.time(),
        "actor_kind": actor.kind,
        "actor": actor.name,
        "address": actor.address,
        "request_id": actor.request_id,
        "action": action,
        "tenant": tenant,
        "target": target,
        "details": json.dumps(details or {}),
    }
    connection.execute(insert(schema.audit_log), row)


class AuditLog:
    """Reads the entries."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, wanted: AuditFilter, limit: int, after: int | None = None) -> Sequence[AuditEntry]:
        """Returns at most `limit` entries, newest first. after: only entries older than the one with this id."""
        query = _ENTRIES.limit(limit)
        if wanted.tenant is not None:
            query = query.where(_c.tenant == wanted.tenant)
        if wanted.actor is not None:
            query = query.where(_c.actor == wanted.actor)
        if wanted.action is not None:
            part = _c.action.startswith(wanted.action + ".", autoescape=True)
            query = query.where((_c.action == wanted.action) | part)
        if wanted.since is not None:
            query = query.where(_c.created_at >= wanted.since)
        if wanted.until is not None:
            query = query.where(_c.created_at < wanted.until)
        if after is not None:
            query = query.where(_c.entry_id < after)
        return [_read_entry(row) for row in self._database.read(query)]


def _read_entry(row: Sequence[Any]) -> AuditEntry:
    entry_id, created_at, kind, name, address, request_id, action, tenant, target, details = row
    actor = Actor(ActorKind(kind), name, address, request_id)
    return AuditEntry(entry_id, created_at, actor, action, tenant, target, json.loads(details))
