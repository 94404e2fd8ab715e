"""The prices of tokens, which the operator sets and tenants see. The server bills nothing; the console shows costs."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import select, update
from typing_extensions import TypedDict

from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.errors import DiskFull
from slora_api.http.field_types import STRICT
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import AnyKey, Operator

router = APIRouter(tags=["usage"])

# A price is below one unit of money for each token.
_Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class PriceChange(BaseModel):
    """PUT /admin/prices: prices of a million tokens. A field that is left out is no price.

    currency: what people read beside a cost, such as `EUR`.
    input, output: the price of a million tokens of prompts and of answers.
    cached_input: the price of a million tokens of prompts that the prefix cache had; that of `input` if left out.
    """

    model_config = STRICT
    currency: Annotated[str, Field(max_length=8)] = ""
    input: _Price | None = None
    cached_input: _Price | None = None
    output: _Price | None = None


class PricesObject(TypedDict):
    """The prices of a million tokens; null if the operator has set none.

    currency: what people read beside a cost.
    input, output: of tokens of prompts, and of answers.
    cached_input: of tokens of prompts that the prefix cache had.
    """

    object: Literal["prices"]
    currency: str
    input: float | None
    cached_input: float | None
    output: float | None


@dataclass(frozen=True, slots=True)
class PriceStore:
    """The prices in the database, which all hosts of a platform share."""

    database: Database

    def find(self) -> PricesObject:
        ((stored,),) = self.database.read(select(schema.platform.c.prices))
        return _prices_json(PriceChange(**json.loads(stored)) if stored else PriceChange())

    def change(self, prices: PriceChange) -> PricesObject:
        """Raises DiskFull."""
        changed = _prices_json(prices)
        with self.database.transaction(CHANGES) as connection:
            connection.execute(update(schema.platform).values(prices=prices.model_dump_json()))
            record_change(connection, "prices.change", "", details=prices.model_dump())
        return changed


def _prices_json(prices: PriceChange) -> PricesObject:
    cached = prices.input if prices.cached_input is None else prices.cached_input
    return {
        "object": "prices",
        "currency": prices.currency,
        "input": prices.input,
        "cached_input": cached,
        "output": prices.output,
    }


@router.get("/v1/prices")
def show_prices(_key: AnyKey, store: Wired[PriceStore]) -> PricesObject:
    """Shows the prices that the operator has set. Any key may read them."""
    return store.find()


@router.put("/admin/prices", responses=errors(DiskFull))
def change_prices(body: PriceChange, _operator: Operator, store: Wired[PriceStore]) -> PricesObject:
    return store.change(body)
