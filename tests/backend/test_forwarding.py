"""A backend that wraps another one passes every call on."""

import inspect
from functools import partial
from typing import Any

import pytest

from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.read_only import ReadOnlyBackend
from tensorstore_ck.backend.resumable_upload import resumable

CALLS = {name: inspect.signature(function) for name, function in vars(Backend).items() if inspect.isfunction(function) and name[0] != "_"}
CALLS.pop("get_if_there")


class Recording(MemoryBackend):
    """Notes calls, and answers each with the note."""

    url = "memory://recorded"
    is_local = False
    noted: tuple[Any, ...] = ()

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name) if name not in CALLS else partial(self.note, name)

    def note(self, *call: Any, **options: Any) -> tuple[Any, ...]:
        self.noted = (*call, options)
        return self.noted


@pytest.mark.parametrize("name", CALLS)
def test_every_call_reaches_the_backend_inside_with_its_arguments(name: str) -> None:
    recording = Recording()
    wrapper = ForwardingBackend(recording)
    parameters = [parameter for parameter in CALLS[name].parameters.values() if parameter.name != "self"]
    arguments = [object() for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    options = {parameter.name: object() for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    answer = getattr(wrapper, name)(*arguments, **options)
    assert recording.noted == (name, *arguments, options)
    assert answer is (None if CALLS[name].return_annotation is None else recording.noted)
    assert (wrapper.url, wrapper.is_local) == ("memory://recorded", False)


class Uploading(MemoryBackend):
    def begin_upload(self, name: str, size_bytes: int) -> Any:
        raise NotImplementedError


def test_the_backend_inside_has_the_resumable_uploads() -> None:
    uploading = Uploading()
    found: object = resumable(ReadOnlyBackend(ForwardingBackend(uploading)))
    assert found is uploading
    assert resumable(ForwardingBackend(MemoryBackend())) is None
