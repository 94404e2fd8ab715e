"""Makes Triton's interpreter skip work that it repeats. Interpreted tests then take a third of the time."""

import dataclasses
import functools

from triton.runtime import interpreter


def hasten_interpreter(*, detect_overflow: bool) -> None:
    """Prepares Triton's language once for each module of device functions, instead of at each call of one.

    detect_overflow: whether to compute each sum and product of integers a second time, in 64 bits.
    """
    prepared: set[str] = set()

    def call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        # Each launch prepares the language for its kernel and undoes that at its end. What only device functions need
        # is never undone.
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=detect_overflow)
    find_dtype = interpreter._get_np_dtype
    find_number_dtype = functools.cache(find_dtype)
    interpreter._get_np_dtype = lambda dtype: (
        find_dtype(dtype) if dtype.scalar.is_ptr() else find_number_dtype(dtype.scalar)
    )
