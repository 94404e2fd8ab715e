"""How routes get the objects that they use.

Each feature declares the objects of its routes as a dataclass. The composition root makes one of each class. A route
receives it through a parameter such as `services: Wired[KeyServices]`.
"""

from collections.abc import Callable, Coroutine, Iterable
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute

from slora_api.core.threads import HOUSEKEEPING, tenant_slot

_Object = TypeVar("_Object")
_Find = Callable[[Request], Coroutine[Any, Any, Any]]


def wire(app: FastAPI, objects: Iterable[object]) -> None:
    """Gives the routes of `app` the objects, by their classes."""
    app.state.objects = {type(each): each for each in objects}


class _Finder:
    def __init__(self, kind: type) -> None:
        self._kind = kind

    async def __call__(self, request: Request) -> Any:
        # This is a coroutine, because FastAPI would call any other dependency on a thread.
        return request.app.state.objects[self._kind]


if TYPE_CHECKING:
    Wired = Annotated[_Object, "the object of this class"]
else:

    class Wired:
        def __class_getitem__(cls, kind: type) -> Any:
            return Annotated[kind, Depends(_Finder(kind))]


class TenantRoute(APIRoute):
    """A route of tenants. FastAPI runs an endpoint that is a plain function on one of 40 threads, which it also needs
    for operators. So a tenant's request holds a slot of the tenants' threads meanwhile.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if iscoroutinefunction(self.endpoint):
            return handle

        async def handle_in_slot(request: Request) -> Response:
            async with tenant_slot(getattr(request.state.caller, "tenant", None) or HOUSEKEEPING):
                return await handle(request)

        return handle_in_slot


class DirectRoute(APIRoute):
    """A busy route. Its endpoint is a coroutine that takes the request and the results of dependencies of the request
    alone, such as `Wired`, and returns a Response. The route calls them itself, because FastAPI's search for what they
    need takes a twentieth of the CPU time of a short answer.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, request_name = self.endpoint, str(self.dependant.request_param_name)
        finders = {str(each.name): cast(_Find, each.call) for each in self.dependant.dependencies}
        taken = {*finders, request_name}
        assert iscoroutinefunction(endpoint) and taken == signature(endpoint).parameters.keys(), self.path
        assert not any(each.dependencies for each in self.dependant.dependencies), self.path

        async def handle(request: Request) -> Response:
            found = {name: await find(request) for name, find in finders.items()}
            response: Response = await endpoint(**{request_name: request}, **found)
            return response

        return handle
