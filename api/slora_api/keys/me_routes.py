"""/v1/me: the key of the request, for every valid key."""

from fastapi import APIRouter

from slora_api.keys.authentication import AnyKey
from slora_api.keys.routes import KeyObject, key_json

router = APIRouter(tags=["server"])


@router.get("/v1/me")
async def show_key(key: AnyKey) -> KeyObject:
    """Describes the key of the request: its tenant, its scopes, and when it expires."""
    return key_json(key)
