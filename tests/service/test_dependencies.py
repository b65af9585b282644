"""Dependencies of routes: FastAPI calls a plain function in a thread, at 0.1 ms per request."""

from collections.abc import Iterator
from pathlib import Path

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from service.app import create_app
from service.compat.serving.call import ServingCall
from tests.fake_engine import FakeEngine
from tests.serving import settings_for


def dependencies(dependant: Dependant) -> Iterator[Dependant]:
    for each in dependant.dependencies:
        yield each
        yield from dependencies(each)


def test_dependencies_run_on_the_event_loop(tmp_path: Path) -> None:
    app = create_app(settings_for(tmp_path), FakeEngine())
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    found = [each for route in routes for each in dependencies(route.dependant)]
    assert len(found) > len(routes)
    in_threads = {each.call for each in found if not each.is_coroutine_callable}
    assert in_threads <= {ServingCall}
