"""A pickle's opcodes, played on inert values: nothing is imported, looked up or called.

A pickle is a program for a small stack machine (the standard library's `pickletools` documents each opcode).
Here its objects stay what the stream says: a global is a `Global`, what a call would make is a `Call`, and
the rest are plain strings, numbers, tuples, lists and dicts. Every opcode of the protocols 0 to 5 is
understood but those for buffers outside the stream. A stream that is malformed ends in a `PickleError`,
whatever it holds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

MAX_STREAM_BYTES = 16_000_000
"""No stream is longer, so that its objects fit in memory. A quantized tensor takes about 500 bytes of it."""

_MAX_INT_BYTES = 255
# Python's own pickler closes its batches after 1000 items, so an honest stack holds a few thousand.
_MAX_STACK = 1_000_000
_MAX_MARKS = 10_000
_WORD = struct.Struct("<I")


class PickleError(Exception):
    """A malformed stream. globals_seen: what it had named until then."""

    def __init__(self, reason: str, globals_seen: tuple[Global, ...]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.globals_seen = globals_seen


class Global:
    """What the stream names `module.name`, never looked up. `changed`: the stream sets attributes on it."""

    __slots__ = ("changed", "module", "name", "path")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.path = f"{module}.{name}"
        self.changed = False


class Call:
    """What a call of `func` with `args` would make, and what the stream then does to it."""

    __slots__ = ("args", "func", "items", "state")

    def __init__(self, func: Any, args: tuple[Any, ...]) -> None:
        self.func = func
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []


class Persistent:
    """An object that lies outside the stream, known by `key`; in torch's files a storage."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


class Opaque:
    """A value that has no use here but must not be lost: a set, or a dict key that is no scalar."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: str, value: Any) -> None:
        self.kind = kind
        self.value = value


def interpret(stream: bytes) -> tuple[Any, tuple[Global, ...]]:
    """Play a pickle; returns its value and all globals that it names. PickleError if it is malformed."""
    machine = _Machine(stream)
    if len(stream) > MAX_STREAM_BYTES:
        raise PickleError(f"{len(stream):,} bytes, {MAX_STREAM_BYTES:,} are allowed", ())
    try:
        value = machine.run()
    except _Malformed as error:
        reason = str(error)
    except IndexError:
        reason = "ends too early" if machine.pos >= len(stream) else "takes a value off an empty stack"
    except struct.error:
        reason = "ends too early"
    except KeyError as error:
        reason = f"reads memo {error}, which it never wrote"
    except ValueError:
        reason = "holds text or a number that cannot be decoded"
    else:
        return value, tuple(machine.globals.values())
    raise PickleError(f"the pickle {reason} (at byte {machine.pos:,})", tuple(machine.globals.values()))


class _Malformed(Exception):  # noqa: N818
    """Why a stream is malformed, to go on after "the pickle"."""


class _Machine:
    """The interpreter's state: the stream, its position, the stack, the stacks below open marks, the memo."""

    __slots__ = ("data", "globals", "marks", "memo", "pos", "stack", "stopped")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pos = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.stopped = False

    def run(self) -> Any:
        """Play until STOP. The opcodes that make up nine tenths of torch's streams are inlined for speed."""
        data, memo, marks, handlers, word = self.data, self.memo, self.marks, _HANDLERS, _WORD.unpack_from
        stack = self.stack
        pos = 0
        try:
            while not self.stopped:
                op = data[pos]
                pos += 1
                if op == 0x68:  # BINGET
                    stack.append(memo[data[pos]])
                    pos += 1
                elif op == 0x72:  # LONG_BINPUT
                    memo[word(data, pos)[0]] = stack[-1]
                    pos += 4
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos])
                    pos += 1
                elif op == 0x28:  # MARK
                    if len(marks) > _MAX_MARKS:
                        raise _Malformed("opens marks without end")
                    marks.append(stack)
                    self.stack = stack = []
                elif op == 0x71:  # BINPUT
                    memo[data[pos]] = stack[-1]
                    pos += 1
                elif op == 0x6A:  # LONG_BINGET
                    stack.append(memo[word(data, pos)[0]])
                    pos += 4
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + word(data, pos)[0]
                    if end > len(data):
                        raise _Malformed("ends inside a string")
                    stack.append(str(data[pos + 4 : end], "utf-8"))
                    pos = end
                else:
                    self.pos = pos
                    handler = handlers.get(op)
                    if len(stack) > _MAX_STACK:
                        raise _Malformed("piles up values without end")
                    if handler is None:
                        raise _Malformed(f"has the unknown opcode 0x{op:02x}")
                    handler(self)
                    pos = self.pos
                    stack = self.stack
        finally:
            self.pos = max(self.pos, pos)
        if self.marks:
            raise _Malformed("stops inside an open mark")
        if not self.stack:
            raise _Malformed("stops on an empty stack")
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        """The next `count` bytes of the stream."""
        end = self.pos + count
        if count < 0 or end > len(self.data):
            raise _Malformed(f"wants {count:,} more bytes, {len(self.data) - self.pos:,} are left")
        taken = self.data[self.pos : end]
        self.pos = end
        return taken

    def line(self) -> bytes:
        """The rest of the line, without its end."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise _Malformed("ends inside a line")
        taken = self.data[self.pos : end]
        self.pos = end + 1
        return taken

    def unsigned(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def pop_mark(self) -> list[Any]:
        """What lies above the topmost mark; the stack is again the one below it."""
        if not self.marks:
            raise _Malformed("closes a mark that it never opened")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def push_global(self, module: str, name: str) -> None:
        known = self.globals.get((module, name))
        if known is None:
            known = self.globals[module, name] = Global(module, name)
        self.stack.append(known)

    def push_call(self, func: Any, args: Any) -> None:
        if not isinstance(args, tuple):
            raise _Malformed("calls with something that is no tuple")
        if not args and isinstance(func, Global) and func.path == "collections.OrderedDict":
            self.stack.append({})
        else:
            self.stack.append(Call(func, args))


_Handler = Callable[[_Machine], None]


def _key(value: Any) -> Any:
    """`value` as a dict key. A nested tuple would be hashed in unbounded recursion, so it becomes a token."""
    is_flat = value is None or isinstance(value, (str, int, float, bytes, Global, Call))
    return value if is_flat else Opaque("key", value)


def _set_items(target: Any, flat: list[Any]) -> None:
    if len(flat) % 2:
        raise _Malformed("sets a key without a value")
    if isinstance(target, dict):
        for index in range(0, len(flat), 2):
            key = flat[index]
            target[key if type(key) is str else _key(key)] = flat[index + 1]
    elif isinstance(target, (Call, Global)):
        _note(target, flat)
    else:
        raise _Malformed("sets items on something that is no dict")


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Opaque) and isinstance(target.value, list):
        target.value.extend(items)
    elif isinstance(target, (Call, Global)):
        _note(target, items)
    else:
        raise _Malformed("appends to something that is no list")


def _note(target: Call | Global, items: list[Any]) -> None:
    if isinstance(target, Global):
        target.changed = True
    else:
        target.items.extend(items)


def _proto(m: _Machine) -> None:
    version = m.unsigned(1)
    if version > 5:
        raise _Malformed(f"is of protocol {version}, 5 is the newest")


def _global(m: _Machine) -> None:
    module = str(m.line(), "utf-8")
    m.push_global(module, str(m.line(), "utf-8"))


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise _Malformed("names a global by something that is no text")
    m.push_global(module, name)


def _extension(width: int) -> _Handler:
    def handler(m: _Machine) -> None:
        m.push_global("copyreg", f"extension {m.unsigned(width)}")

    return handler


def _reduce(m: _Machine) -> None:
    args = m.stack.pop()
    m.push_call(m.stack.pop(), args)


def _newobj_ex(m: _Machine) -> None:
    kwargs, args = m.stack.pop(), m.stack.pop()
    m.push_call(m.stack.pop(), args)
    if kwargs and isinstance(m.stack[-1], Call):
        m.stack[-1].state = kwargs


def _inst(m: _Machine) -> None:
    args = tuple(m.pop_mark())
    _global(m)
    m.push_call(m.stack.pop(), args)


def _obj(m: _Machine) -> None:
    items = m.pop_mark()
    m.push_call(items[0], tuple(items[1:]))


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if isinstance(target, Call):
        target.state = state
    elif isinstance(target, Global):
        target.changed = True
    elif not isinstance(target, dict):  # an OrderedDict's own attributes (`_metadata`) matter to nobody here
        raise _Malformed("sets the state of something that has none")


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()


def _pop_mark(m: _Machine) -> None:
    m.pop_mark()


def _frame(m: _Machine) -> None:
    m.take(8)  # a frame's length helps a reader of pipes; a stream in memory needs none


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_items(m.stack[-1], [key, value])


def _setitems(m: _Machine) -> None:
    items = m.pop_mark()
    _set_items(m.stack[-1], items)


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    _extend(m.stack[-1], [value])


def _appends(m: _Machine) -> None:
    items = m.pop_mark()
    _extend(m.stack[-1], items)


def _dict(m: _Machine) -> None:
    built: dict[Any, Any] = {}
    _set_items(built, m.pop_mark())
    m.stack.append(built)


def _marked_tuple(m: _Machine) -> None:
    items = tuple(m.pop_mark())
    m.stack.append(items)


def _marked_list(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append(items)


def _frozenset(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append(Opaque("frozenset", items))


def _tuple(width: int) -> _Handler:
    def handler(m: _Machine) -> None:
        stack = m.stack
        if len(stack) < width:
            raise _Malformed("takes a value off an empty stack")
        stack[-width:] = [tuple(stack[-width:])]

    return handler


def _get(m: _Machine) -> None:
    m.stack.append(m.memo[_decimal(m.line())])


def _put(m: _Machine) -> None:
    m.memo[_decimal(m.line())] = m.stack[-1]


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _int_line(m: _Machine) -> None:
    line = m.line()
    m.stack.append(line == b"01" if line in (b"00", b"01") else _decimal(line))


def _long_line(m: _Machine) -> None:
    m.stack.append(_decimal(m.line().removesuffix(b"L")))


def _decimal(line: bytes) -> int:
    if len(line) > _MAX_INT_BYTES:
        raise _Malformed(f"has an integer of {len(line):,} digits")
    return int(line)


def _long(width: int) -> _Handler:
    def handler(m: _Machine) -> None:
        size = m.unsigned(width)
        if size > _MAX_INT_BYTES:
            raise _Malformed(f"has an integer of {size:,} bytes")
        m.stack.append(int.from_bytes(m.take(size), "little", signed=True))

    return handler


def _text(width: int) -> _Handler:
    def handler(m: _Machine) -> None:
        m.stack.append(str(m.take(m.unsigned(width)), "utf-8"))

    return handler


def _bytes(width: int) -> _Handler:
    def handler(m: _Machine) -> None:
        m.stack.append(m.take(m.unsigned(width)))

    return handler


def _string_line(m: _Machine) -> None:
    line = m.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise _Malformed("has a string without quotes")
    m.stack.append(str(line[1:-1], "utf-8"))


def _unicode_line(m: _Machine) -> None:
    m.stack.append(str(m.line(), "raw-unicode-escape"))


def _float_line(m: _Machine) -> None:
    m.stack.append(float(m.line()))


def _unpacked(layout: str) -> _Handler:
    shape = struct.Struct(layout)

    def handler(m: _Machine) -> None:
        m.stack.append(shape.unpack(m.take(shape.size))[0])

    return handler


def _constant(value: bool | None) -> _Handler:
    def handler(m: _Machine) -> None:
        m.stack.append(value)

    return handler


def _stop(m: _Machine) -> None:
    m.stopped = True


# fmt: off
_HANDLERS: Mapping[int, _Handler] = {ord(code): handler for code, handler in (
    ("\x80", _proto), ("\x95", _frame), (".", _stop),
    # the stack and the memo
    ("0", _pop), ("1", _pop_mark), ("2", lambda m: m.stack.append(m.stack[-1])),
    ("g", _get), ("p", _put), ("\x94", _memoize),
    # numbers, constants, text, bytes
    ("N", _constant(None)), ("\x88", _constant(True)), ("\x89", _constant(False)),
    ("I", _int_line), ("L", _long_line), ("F", _float_line), ("S", _string_line), ("V", _unicode_line),
    ("J", _unpacked("<i")), ("M", _unpacked("<H")), ("G", _unpacked(">d")),
    ("\x8a", _long(1)), ("\x8b", _long(4)),
    ("\x8c", _text(1)), ("\x8d", _text(8)), ("U", _text(1)), ("T", _text(4)),
    ("C", _bytes(1)), ("B", _bytes(4)), ("\x8e", _bytes(8)), ("\x96", _bytes(8)),
    # containers
    (")", lambda m: m.stack.append(())), ("t", _marked_tuple),
    ("\x85", _tuple(1)), ("\x86", _tuple(2)), ("\x87", _tuple(3)),
    ("]", lambda m: m.stack.append([])), ("l", _marked_list), ("a", _append), ("e", _appends),
    ("}", lambda m: m.stack.append({})), ("d", _dict), ("s", _setitem), ("u", _setitems),
    ("\x8f", lambda m: m.stack.append(Opaque("set", []))), ("\x90", _appends),
    ("\x91", _frozenset),
    # globals, calls, state, outside objects
    ("c", _global), ("\x93", _stack_global),
    ("\x82", _extension(1)), ("\x83", _extension(2)), ("\x84", _extension(4)),
    ("R", _reduce), ("\x81", _reduce), ("\x92", _newobj_ex), ("i", _inst), ("o", _obj), ("b", _build),
    ("Q", lambda m: m.stack.append(Persistent(m.stack.pop()))),
    ("P", lambda m: m.stack.append(Persistent(m.line()))),
)}
# fmt: on
