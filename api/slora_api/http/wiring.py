"""How routes get the objects that they use.

Each feature declares the objects of its routes as a dataclass. The composition root makes one of each class. A route
receives it through a parameter such as `services: Wired[KeyServices]`.
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from slora_api.core.threads import HOUSEKEEPING, tenant_slot

_Object = TypeVar("_Object")
_Find = Callable[[Request], Coroutine[Any, Any, Any]]
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


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

    def get_route_handler(self) -> _Handler:
        handle = super().get_route_handler()
        if iscoroutinefunction(self.endpoint):
            return handle

        async def handle_in_slot(request: Request) -> Response:
            async with tenant_slot(getattr(request.state.caller, "tenant", None) or HOUSEKEEPING):
                return await handle(request)

        return handle_in_slot


class DirectRoute(APIRoute):
    """A busy route. Its endpoint is a coroutine that takes the request and the results of dependencies of the request
    alone, such as `Wired`, and returns a Response. Its path has no parameters.

    `DirectApp` calls them itself. FastAPI's search for what an endpoint needs, and its twelve coroutines around each
    endpoint, which every event of a stream passes on its way, take a tenth of the CPU time of a short stream.
    """

    def get_route_handler(self) -> _Handler:
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


class DirectApp(FastAPI):
    """Answers the requests to each `DirectRoute` itself, and all others as FastAPI does.

    errors: the kinds of errors that `answer_error` answers. All others are bugs, which the caller answers.
    """

    def __init__(
        self,
        routes: Sequence[APIRoute],
        errors: tuple[type[Exception], ...],
        answer_error: Callable[[Request, Any], Coroutine[Any, Any, Response]],
        **settings: Any,
    ) -> None:
        super().__init__(routes=[*routes], **settings)
        for kind in (*errors, Exception):
            self.add_exception_handler(kind, answer_error)
        self._errors, self._answer_error = errors, answer_error
        self._direct: dict[tuple[str | None, str | None], tuple[APIRoute, _Handler]] = {
            (method, route.path): (route, route.get_route_handler())
            for route in routes
            if isinstance(route, DirectRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._direct.get((scope.get("method"), scope.get("path")))
        if found is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"], (scope["route"], handle) = self, found
        request = Request(scope, receive, send)
        try:
            response = await handle(request)
            await response(scope, receive, send)
        except self._errors as error:
            response = await self._answer_error(request, error)
            await response(scope, receive, send)
