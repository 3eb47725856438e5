"""Shipping a handler to the workers: by value, from the learner's own kernel, or a clear word about why it cannot be."""

import functools
import inspect
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from labkit.errors import HandlerError, PlanError, told

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def pack(handler: Callable, what: str = "handler", *given: str, along: Any = None) -> bytes:
    """Returns (handler, along) as bytes, in one piece, so that both mean the same classes. Raises HandlerError that names the variable which cannot go along.

    what:  what it is: "handler", "producer" or "relay"; given: the names of what it is called with, (delivery, shop) where none are given
    """
    given = given or ("delivery", "shop")
    if not callable(handler):
        raise HandlerError(f"The {what} is {handler!r}, which cannot be called.", "a value was given where a function is expected",
                           f"Write `def {what}({', '.join(given)}): …` and give its name, without brackets.")
    _check_call(handler, what, given)
    module = sys.modules.get(getattr(_function(handler), "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not (getattr(module, "__file__", None) or "/").startswith(_LIBRARIES) \
        and hasattr(module, "__file__")
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((handler, along))
    except Exception as error:
        culprit = _culprit(handler)
        why = f"it uses {culprit}, which lives in this notebook's process only" if culprit else f"{type(error).__name__}: {error}"
        raise HandlerError(f"The {what} {name_of(handler)!r} cannot be sent to a worker process.", why,
                           "Make what it needs inside the handler, or pass plain values.") from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _check_call(handler: Callable, what: str, given: tuple[str, ...]) -> None:
    """Raises HandlerError when the handler cannot be called with what is given, or would do nothing."""
    function = _function(handler)
    body = function if isinstance(function, types.FunctionType) else getattr(function, "__call__", None)
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise HandlerError(f"Calling the {what} {name_of(handler)!r} does nothing yet.", "it is written with `async` or `yield`",
                           f"Write an ordinary function: def {what}({', '.join(given)}): …")
    try:
        inspect.signature(handler).bind(*given)
    except TypeError as error:
        raise HandlerError(f"The {what} {name_of(handler)!r} cannot be called with ({', '.join(given)}).", str(error), f"Write def {what}({', '.join(given)}): …"
                           + " — or give its messages, if it is a handler: lab.run(handler, messages), lab.sweep(handler, messages)." * (what == "producer")) from None
    except ValueError:
        pass                                          # something built in, which does not tell


def check_error(error: BaseException) -> None:
    """Raises PlanError when an error cannot be raised in a worker: it does not survive the way there."""
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception as trouble:
        raise PlanError(f"{told(error)} cannot be sent to a worker process.", told(trouble),
                        "Plan a simpler error, such as TimeoutError(\"slow\").") from None


def name_of(handler: Callable) -> str:
    """Returns the name that a learner knows the handler by."""
    return getattr(_function(handler), "__name__", type(handler).__name__)


def files(handler: Callable) -> dict[str, str]:
    """Returns function name -> file, of the handler and what it calls by name; cloudpickle leaves the files out."""
    found: dict[str, str] = {}
    todo = [_function(handler)]
    while todo:
        value = todo.pop()
        code = getattr(value, "__code__", value if isinstance(value, types.CodeType) else None)
        if isinstance(value, type):
            todo += [member for member in vars(value).values() if isinstance(member, types.FunctionType)]
        elif code is not None and code.co_name not in found:
            found[code.co_name] = code.co_filename
            todo += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            todo += [named for name in code.co_names if isinstance(named := getattr(value, "__globals__", {}).get(name), (types.FunctionType, type))]
    return found


def _function(handler: Callable) -> Any:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return handler if hasattr(handler, "__name__") else type(handler)


def _culprit(handler: Callable) -> str | None:
    function = _function(handler)
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    candidates = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    candidates |= {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or ())}
    for name, value in candidates.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"the variable `{name}` ({type(value).__name__})"
    return None
