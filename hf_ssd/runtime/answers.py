"""What the assistant's process says to its caller, read without trusting it: nothing but answers is made of it."""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

from ..types import Miss, Origin, Span, Speculation
from .messages import Answer, Failure, MessageError, Ready, receive_bytes

_ANSWER_FIELDS: dict[type, dict[str, type]] = {
    Ready: {"takes_trees": bool},
    Answer: {"row": int, "speculation": Speculation},
    Failure: {"row": int, "error": str, "lacks_memory": bool},
}
_CLASSES = (*_ANSWER_FIELDS, Speculation, Span, Origin, Miss)


def receive_answer(connection: Connection) -> Ready | Answer | Failure:
    """Waits for a message of the worker's. Of what it may hold, only what answers consist of is made.

    Raises:
        MessageError: If it is too long, or no answer: another program or version wrote it, or a part of it is missing.
    """
    data = receive_bytes(connection)
    try:
        answer = _AnswerUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # unpickling rubbish may raise anything
        raise MessageError(f"what is no message: {error!r}") from error
    if not _is_answer(answer):
        raise MessageError(f"{type(answer).__name__}, which is no answer")
    return answer


def _is_answer(message: Any) -> bool:
    """Whether a message is an answer, and its fields are what they should be."""
    fields = getattr(message, "__dict__", {})
    return any(
        type(message) is kind
        and set(fields) == set(types)
        and all(isinstance(fields[name], each) for name, each in types.items())
        for kind, types in _ANSWER_FIELDS.items()
    )


class _AnswerUnpickler(pickle.Unpickler):
    """Knows no other classes and functions than those of answers, so that unpickling runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        for each in _CLASSES:
            if (each.__module__, each.__qualname__) == (module, name):
                return each
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an answer")
