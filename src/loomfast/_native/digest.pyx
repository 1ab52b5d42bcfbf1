"""The digest kernel, compiled: same names, parameters, texts, digests and errors as `_pure.digest`.

Here: the walk over Python values. The characters it writes are in the digest_*.h beside it, which types
have a JSON form is in `_jsonform`, exact reading is in `_jsontext`.

How the walk differs from the pure one, which is its specification:

- Texts stream into two growing buffers, canonical and persisted, of which a call may want one or both. If
  both, the canonical one is written, and copied to the other before the two begin to differ (`sync`).
  Members are written in the container's own order. When an object closes and its names were not in UTF-16
  order, the spans of its members are sorted and moved within the canonical buffer:

      {"b":1,"a":{"d":2,"c":3}}      the inner object closes: its spans swap
      {"b":1,"a":{"c":3,"d":2}}      the outer one closes: its spans swap
      {"a":{"c":3,"d":2},"b":1}

  A set is an array whose spans are sorted by their canonical bytes, in both buffers; inside a set the
  canonical buffer is therefore written even when the caller wants the persisted text alone.

- Lists are read in place, and dicts from borrowed references to their members, which is safe as long as no
  Python code can run. Before any does (a conversion, the digits of a huge integer, a finalizer run by the
  garbage collector), `freeze` takes references to the entries of each open dict and a copy of each open list.
  Up to then nothing can have changed, so the answer is the same as if each had been copied on entry.

- The frames, spans and buffers are one block, reused from call to call. A call takes it out; a conversion
  hook that calls back into this module finds none and makes its own.

FNV-1a runs over the finished bytes in 64-bit arithmetic. The record's four limbs exist for languages without
64-bit integers; in C they cost several times the one multiplication per byte that is the floor, for the same
answer. They stay as `fnv1a64_limbs`, against which the other is tested.

Invariant: every PyObject* in a frame or a span is a strong reference, released by `pop` or `unwind`; borrowed
are only `Frame.key` and the entries of an `IN_DICT` frame, and never across a `freeze`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawRealloc
from libc.math cimport signbit
from libc.stdint cimport int64_t, uint8_t, uint64_t

from time import perf_counter as _perf_counter

from orjson import JSONDecodeError as _JSONDecodeError
from orjson import loads as _loads

from loomfast import _digits, _jsonform, _jsontext
from loomfast._errors import BadInputError, JsonTextError
from loomfast._jsonform import MAX_DEPTH

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        pass
    ctypedef struct PyObject:
        pass
    PyTypeObject PyUnicode_Type, PyLong_Type, PyFloat_Type, PyDict_Type, PyList_Type, PyTuple_Type
    # Not <PyObject *>True: of that Cython makes the address 1.
    PyObject *Py_None
    PyObject *Py_True
    PyObject *Py_False
    PyTypeObject *Py_TYPE(PyObject *)
    void Py_INCREF(PyObject *)
    void Py_DECREF(PyObject *)
    void Py_XDECREF(PyObject *)
    bint PyUnicode_IS_ASCII(PyObject *)
    int PyDict_Next(PyObject *, Py_ssize_t *, PyObject **, PyObject **)
    Py_ssize_t PyDict_GET_SIZE "PyDict_Size"(PyObject *)
    Py_ssize_t PyList_GET_SIZE(PyObject *)
    PyObject *PyList_GET_ITEM(PyObject *, Py_ssize_t)
    Py_ssize_t PyTuple_GET_SIZE(PyObject *)
    PyObject *PyTuple_GET_ITEM(PyObject *, Py_ssize_t)
    double PyFloat_AS_DOUBLE(PyObject *)
    long long PyLong_AsLongLongAndOverflow(PyObject *, int *)
    double PyLong_AsDouble(PyObject *) except? -1.0

cdef extern from "digest_buffer.h":
    ctypedef struct lf_buffer:
        uint8_t *data
        size_t size
        size_t room
    uint64_t lf_fnv(const uint8_t *, size_t)
    uint64_t lf_fnv_limbs(const uint8_t *, size_t)
    uint64_t lf_chain(const uint8_t *, size_t, size_t)
    int lf_put(lf_buffer *, const uint8_t *, size_t)
    int lf_put_long(lf_buffer *, const void *, size_t)
    int lf_put_word(lf_buffer *, const char *, size_t)
    int lf_put_byte(lf_buffer *, uint8_t)

cdef extern from "digest_string.h":
    int lf_text(lf_buffer *, PyObject *)
    int lf_name(lf_buffer *, PyObject *, int, int *)
    bint lf_has_pair(PyObject *)
    bint lf_plain_to_read(const uint8_t *, size_t, int)

cdef extern from "digest_number.h":
    ctypedef struct lf_power:
        uint64_t high
        uint64_t low
    const int LF_POWER_LOW, LF_POWER_HIGH
    lf_power *lf_powers
    int lf_int(lf_buffer *, int64_t)
    int lf_float(lf_buffer *, double)

cdef extern from "digest_order.h":
    ctypedef struct lf_named:
        uint64_t prefix
        size_t size
        PyObject *key
    ctypedef struct lf_kept:
        uint64_t start
        size_t end
        PyObject *key
    ctypedef union lf_of:
        lf_named name
        lf_kept kept
    ctypedef struct lf_span:
        size_t start
        size_t end
        lf_of of
    void lf_span_name(lf_span *, const uint8_t *, PyObject *, int)
    int lf_compare_names(const uint8_t *, const lf_span *, const lf_span *)
    void lf_sort_names(const uint8_t *, lf_span *, size_t)
    int lf_reorder(lf_buffer *, lf_buffer *, size_t, const lf_span *, size_t, int)
    int lf_sort_set(lf_buffer *, lf_buffer *, lf_buffer *, size_t, size_t, lf_span *, size_t)

REVISION = 3

# What is not walked in place is asked of the table of JSON forms.
cdef object _resolve = _jsonform.resolve
cdef object _dict_members = _jsonform.dict_members
cdef object _too_deep = _jsonform.too_deep
cdef object _Refusal = _jsonform.Refusal
cdef object _type_name = _jsonform.type_name
cdef object _parse = _jsontext.parse
cdef object _MEMBERS = _jsonform.Members
cdef object _BAG = _jsonform.Bag

cdef enum:
    # MAX_DEPTH as a constant, checked at import.
    LEVELS = 256
    # A block that grew beyond this many bytes or spans is given back instead of kept for the next call.
    KEEP_BYTES = 1 << 20
    KEEP_SPANS = 1 << 14
    # Ways to walk a container. The first of each pair becomes the second before Python code runs.
    IN_LIST = 0  # in place
    IN_COPY = 1  # a private copy of a list
    IN_TUPLE = 2
    IN_BAG = 3
    IN_DICT = 4  # from its entries, borrowed
    IN_ENTRIES = 5  # from its entries, owned
    IN_MEMBERS = 6  # a private list [name, value, ...]

if MAX_DEPTH != LEVELS:
    raise ImportError("loomfast._native.digest was built for another MAX_DEPTH")


cdef struct Frame:
    PyObject *owner  # what the caller, or a hook, handed over
    PyObject *body  # what is walked: the same, or what stands for it
    PyObject *name  # of the member that is being walked, set before anything can fail below it
    PyObject *key  # the same, borrowed from the body, for as long as no Python code runs
    Py_ssize_t at  # how far the body has been walked
    Py_ssize_t size  # a dict's length, names and values
    size_t entries  # a dict's names and values stand in the block from here on
    Py_ssize_t count  # members written
    size_t spans  # where its spans begin
    size_t canonical  # where its text begins in each buffer
    size_t kept
    int kind
    bint unsorted  # its names were not met in canonical order
    bint lends  # it is a set, and had the canonical buffer switched on


cdef struct Walk:
    lf_buffer canonical
    lf_buffer kept
    lf_buffer spare
    lf_span *spans
    size_t span_count
    size_t span_room
    PyObject **entries
    size_t entry_count
    size_t entry_room
    int depth
    size_t copied  # with both wanted: how much of the canonical text the persisted one has
    bint want_canonical
    bint want_kept
    Frame frames[LEVELS]


# --- the block of one walk -----------------------------------------------------------------------


cdef Walk *_idle = NULL


cdef Walk *take(bint want_canonical, bint want_kept) except NULL:
    global _idle
    cdef Walk *walk = _idle
    _idle = NULL
    if walk == NULL:
        walk = <Walk *>PyMem_RawCalloc(1, sizeof(Walk))
        if walk == NULL:
            raise MemoryError
    walk.canonical.size = walk.kept.size = walk.span_count = walk.entry_count = walk.copied = 0
    walk.depth = 0
    walk.want_canonical = want_canonical
    walk.want_kept = want_kept
    return walk


# noexcept: only frees memory.
cdef void give_back(Walk *walk) noexcept:
    global _idle
    if (
        _idle == NULL
        and walk.canonical.room <= KEEP_BYTES
        and walk.kept.room <= KEEP_BYTES
        and walk.spare.room <= KEEP_BYTES
        and walk.span_room <= KEEP_SPANS
        and walk.entry_room <= KEEP_SPANS
    ):
        _idle = walk
        return
    PyMem_RawFree(walk.canonical.data)
    PyMem_RawFree(walk.kept.data)
    PyMem_RawFree(walk.spare.data)
    PyMem_RawFree(walk.spans)
    PyMem_RawFree(walk.entries)
    PyMem_RawFree(walk)


# noexcept: drops references; a finalizer that raises is reported by the interpreter, not here.
cdef void drop_spans(Walk *walk, size_t down_to) noexcept:
    cdef PyObject *key
    while walk.span_count > down_to:
        walk.span_count -= 1
        key = walk.spans[walk.span_count].of.name.key
        if key != NULL:
            Py_DECREF(key)


# noexcept: as above.
cdef inline void pop(Walk *walk) noexcept:
    cdef Frame *frame = &walk.frames[walk.depth - 1]
    cdef PyObject *owner = frame.owner
    cdef PyObject *body = frame.body
    cdef PyObject *name = frame.name
    cdef Py_ssize_t at
    walk.depth -= 1
    walk.entry_count = frame.entries
    drop_spans(walk, frame.spans)
    if frame.kind == IN_ENTRIES:
        for at in range(frame.size):
            Py_DECREF(walk.entries[frame.entries + at])
    Py_XDECREF(name)
    Py_DECREF(body)
    Py_DECREF(owner)


# noexcept: as above.
cdef void unwind(Walk *walk) noexcept:
    while walk.depth:
        pop(walk)
    drop_spans(walk, 0)


cdef int no_memory() except -1:
    raise MemoryError


# --- when Python code is about to run ------------------------------------------------------------


# noexcept: only counts references.
cdef inline void hold_name(Frame *frame) noexcept:
    """Turn the borrowed name of the member being walked into a reference of our own."""
    cdef PyObject *old = frame.name
    if frame.key != NULL:
        Py_INCREF(frame.key)
        frame.name = frame.key
        frame.key = NULL
        Py_XDECREF(old)


cdef int freeze(Walk *walk) except -1:
    """Own what the walk has borrowed: the entries of each open dict, and a copy of each open list."""
    cdef int level
    cdef Py_ssize_t at
    cdef Frame *frame
    cdef PyObject *old
    # First all that needs no memory: making a list may collect garbage, and so run finalizers.
    for level in range(walk.depth):
        frame = &walk.frames[level]
        hold_name(frame)
        if frame.kind == IN_DICT:
            for at in range(frame.size):
                Py_INCREF(walk.entries[frame.entries + at])
            frame.kind = IN_ENTRIES
    for level in range(walk.depth):
        frame = &walk.frames[level]
        if frame.kind == IN_LIST:
            copy = []
            at = 0
            while at < PyList_GET_SIZE(frame.body):
                copy.append(<object>PyList_GET_ITEM(frame.body, at))
                at += 1
            frame.kind = IN_COPY
            old = frame.body
            frame.body = <PyObject *>copy
            Py_INCREF(frame.body)
            Py_DECREF(old)
    return 0


cdef list steps_of(Walk *walk):
    """Return the path of the value that is being walked, as `_jsonform.path_text` takes it."""
    cdef int level
    cdef Frame *frame
    steps = []
    for level in range(walk.depth):
        frame = &walk.frames[level]
        if frame.kind == IN_BAG:
            steps.append(None)
        elif frame.name != NULL:
            steps.append(<object>frame.name)
        else:
            steps.append(frame.at - 1)
    return steps


cdef object convert(Walk *walk, object function, object value):
    """Call a conversion of `_jsonform`; give its refusal the path of `value`."""
    freeze(walk)
    try:
        return function(value)
    except _Refusal as refusal:
        raise refusal.at(steps_of(walk)) from refusal.__cause__


cdef int refuse_depth(Walk *walk, object owner) except -1:
    cdef int level
    owners = []
    for level in range(walk.depth):
        owners.append(<object>walk.frames[level].owner)
    raise _too_deep(owners, owner, steps_of(walk))


# --- scalars -------------------------------------------------------------------------------------


cdef inline lf_buffer *buffer_of(Walk *walk) noexcept:  # noexcept: an address
    """Return the buffer that is written; when both are wanted, `sync` brings the other up to date."""
    return &walk.canonical if walk.want_canonical else &walk.kept


cdef inline int sync(Walk *walk) except -1:
    """If both texts are wanted, append to the persisted one what was written to the canonical one since last.

    Due before the two begin to differ: before canonical members move, and where a float is written in two
    ways.
    """
    if walk.want_canonical and walk.want_kept and walk.canonical.size > walk.copied:
        if lf_put(&walk.kept, walk.canonical.data + walk.copied, walk.canonical.size - walk.copied) < 0:
            no_memory()
        walk.copied = walk.canonical.size
    return 0


cdef inline int put_byte(Walk *walk, uint8_t byte) except -1:
    if lf_put_byte(buffer_of(walk), byte) < 0:
        no_memory()
    return 0


cdef inline int put_word(Walk *walk, const char *word, size_t size) except -1:
    """Write the first `size` of the 8 bytes at `word`."""
    if lf_put_word(buffer_of(walk), word, size) < 0:
        no_memory()
    return 0


cdef inline int put_float(Walk *walk, double value) except -1:
    cdef int whole
    if walk.want_kept and value == 0 and signbit(value):
        sync(walk)
        if lf_put_byte(&walk.kept, c"-") < 0:
            no_memory()
    whole = lf_float(buffer_of(walk), value)
    if whole < 0:
        no_memory()
    if whole and walk.want_kept:
        sync(walk)
        if lf_put_word(&walk.kept, b".0\0\0\0\0\0\0", 2) < 0:
            no_memory()
    return 0


cdef int put_int(Walk *walk, PyObject *value) except -1:
    cdef int overflow = 0
    cdef long long small = PyLong_AsLongLongAndOverflow(value, &overflow)
    cdef double size
    cdef bytes text
    if not overflow:
        if lf_int(buffer_of(walk), small) < 0:
            no_memory()
        return 0
    # Raising makes an object, which may collect garbage and so run finalizers.
    held = <object>value
    freeze(walk)
    try:
        size = PyLong_AsDouble(value)
    except OverflowError:
        size = 1e300
    if -1e300 < size < 1e300:
        # At most 300 digits: the interpreter writes them in C and without a limit.
        text = repr(held).encode("ascii")
    else:
        text = _digits.text(held).encode("ascii")
    if lf_put_long(buffer_of(walk), PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text)) < 0:
        no_memory()
    return 0


cdef inline int put_scalar(Walk *walk, PyObject *value) except -1:
    """Write `value` and return 1 if it is a plain scalar, else return 0."""
    cdef PyTypeObject *kind = Py_TYPE(value)
    if kind == &PyUnicode_Type:
        if lf_text(buffer_of(walk), value) < 0:
            no_memory()
    elif kind == &PyLong_Type:
        put_int(walk, value)
    elif value == Py_None:
        put_word(walk, b"null\0\0\0", 4)
    elif value == Py_True:
        put_word(walk, b"true\0\0\0", 4)
    elif value == Py_False:
        put_word(walk, b"false\0\0", 5)
    elif kind == &PyFloat_Type:
        put_float(walk, PyFloat_AS_DOUBLE(value))
    else:
        return 0
    return 1


# --- containers ----------------------------------------------------------------------------------


cdef int grow_entries(Walk *walk, size_t more) except -1:
    cdef size_t room = walk.entry_room * 2 + more + 64
    cdef PyObject **entries = <PyObject **>PyMem_RawRealloc(walk.entries, room * sizeof(PyObject *))
    if entries == NULL:
        raise MemoryError
    walk.entries = entries
    walk.entry_room = room
    return 0


cdef inline int list_entries(Walk *walk, PyObject *value) except -1:
    """Append names and values of an exact dict, borrowed, to the entries.

    Return 0, with nothing appended, if a key is not exact text or is text that JSON cannot tell from another.
    """
    cdef Py_ssize_t at = 0
    cdef size_t count = walk.entry_count
    cdef size_t more = 2 * <size_t>PyDict_GET_SIZE(value)
    if walk.entry_room - count < more:
        grow_entries(walk, more)
    while PyDict_Next(value, &at, &walk.entries[count], &walk.entries[count + 1]):
        if Py_TYPE(walk.entries[count]) != &PyUnicode_Type:
            return 0
        if not PyUnicode_IS_ASCII(walk.entries[count]) and lf_has_pair(walk.entries[count]):
            return 0
        count += 2
    walk.entry_count = count
    return 1


cdef int enter(Walk *walk, PyObject *value) except -1:
    """Open the container that `value` is or stands for; or write the scalar that it stands for."""
    cdef PyTypeObject *kind = Py_TYPE(value)
    cdef int way
    cdef size_t entries = walk.entry_count
    owner = <object>value
    body = owner
    if walk.depth:
        hold_name(&walk.frames[walk.depth - 1])
    if kind != &PyDict_Type and kind != &PyList_Type and kind != &PyTuple_Type:
        body = convert(walk, _resolve, owner)
        if put_scalar(walk, <PyObject *>body):
            return 0
        kind = Py_TYPE(<PyObject *>body)
    if walk.depth == LEVELS:
        refuse_depth(walk, owner)
    if kind == &PyDict_Type:
        way = IN_DICT
        if not list_entries(walk, <PyObject *>body):
            body = convert(walk, _dict_members, body)
            way = IN_MEMBERS
    elif kind == &PyList_Type:
        way = IN_LIST
    elif kind == &PyTuple_Type:
        way = IN_TUPLE
    elif kind == <PyTypeObject *><PyObject *>_MEMBERS:
        way = IN_MEMBERS
    else:
        way = IN_BAG
    return push(walk, <PyObject *>owner, <PyObject *>body, way, entries)


cdef inline size_t kept_size(Walk *walk) noexcept:  # noexcept: arithmetic
    """Return how long the persisted text would be after `sync`."""
    return walk.kept.size + (walk.canonical.size - walk.copied)


cdef inline int push(Walk *walk, PyObject *owner, PyObject *body, int way, size_t entries) except -1:
    cdef Frame *frame = &walk.frames[walk.depth]
    put_byte(walk, c"{" if way >= IN_DICT else c"[")
    Py_INCREF(owner)
    Py_INCREF(body)
    frame.owner = owner
    frame.body = body
    frame.name = frame.key = NULL
    frame.at = frame.count = 0
    frame.kind = way
    frame.unsorted = frame.lends = False
    if way == IN_BAG:
        if not walk.want_canonical:
            frame.lends = walk.want_canonical = True
            walk.copied = 0
        frame.kept = kept_size(walk)
    frame.spans = walk.span_count
    frame.entries = entries
    frame.size = walk.entry_count - entries
    frame.canonical = walk.canonical.size
    walk.depth += 1
    return 0


cdef int grow_spans(Walk *walk) except -1:
    cdef size_t room = walk.span_room * 2 + 64
    cdef lf_span *spans = <lf_span *>PyMem_RawRealloc(walk.spans, room * sizeof(lf_span))
    if spans == NULL:
        raise MemoryError
    walk.spans = spans
    walk.span_room = room
    return 0


cdef inline lf_span *next_span(Walk *walk, Frame *frame) except NULL:
    """Return the span of the member about to begin, after the comma before it; the one before ends there."""
    cdef lf_span *span
    if walk.span_count == walk.span_room:
        grow_spans(walk)
    span = &walk.spans[walk.span_count]
    span.start = walk.canonical.size + (frame.count > 0)
    if frame.kind == IN_BAG:
        span.of.kept.start = kept_size(walk) + (frame.count > 0)
    span.of.kept.key = NULL
    end_span(walk, frame)
    walk.span_count += 1
    return span


# noexcept: two assignments.
cdef inline void end_span(Walk *walk, Frame *frame) noexcept:
    if walk.span_count > frame.spans:
        walk.spans[walk.span_count - 1].end = walk.canonical.size
        if frame.kind == IN_BAG:
            walk.spans[walk.span_count - 1].of.kept.end = kept_size(walk)


cdef inline int put_name(Walk *walk, Frame *frame, PyObject *name) except -1:
    """Write the comma, the name and the colon of the next member."""
    cdef lf_buffer *buffer = buffer_of(walk)
    cdef int clean = 0
    cdef lf_span *span = NULL
    if walk.want_canonical:
        span = next_span(walk, frame)
    if lf_name(buffer, name, frame.count > 0, &clean) < 0:
        no_memory()
    if span != NULL:
        lf_span_name(span, buffer.data, name, clean)
        if frame.count and not frame.unsorted:
            frame.unsorted = lf_compare_names(buffer.data, span - 1, span) > 0
    frame.key = name
    frame.count += 1
    return 0


cdef inline PyObject *next_value(Walk *walk, Frame *frame) except? NULL:
    """Write what stands before the next value of the frame; return that, borrowed, or NULL at the end."""
    cdef PyObject *value
    if frame.kind == IN_DICT or frame.kind == IN_ENTRIES:
        if frame.at >= frame.size:
            return NULL
        put_name(walk, frame, walk.entries[frame.entries + frame.at])
        value = walk.entries[frame.entries + frame.at + 1]
        frame.at += 2
        return value
    if frame.kind == IN_MEMBERS:
        if frame.at >= PyList_GET_SIZE(frame.body):
            return NULL
        put_name(walk, frame, PyList_GET_ITEM(frame.body, frame.at))
        value = PyList_GET_ITEM(frame.body, frame.at + 1)
        frame.at += 2
        return value
    if frame.kind == IN_TUPLE:
        if frame.at >= PyTuple_GET_SIZE(frame.body):
            return NULL
        value = PyTuple_GET_ITEM(frame.body, frame.at)
    else:
        if frame.at >= PyList_GET_SIZE(frame.body):
            return NULL
        value = PyList_GET_ITEM(frame.body, frame.at)
    if frame.kind == IN_BAG:
        next_span(walk, frame)
    if frame.count:
        put_byte(walk, c",")
    frame.at += 1
    frame.count += 1
    return value


cdef int leave(Walk *walk) except -1:
    """Close the innermost container: order its members, write its end, drop its frame."""
    cdef Frame *frame = &walk.frames[walk.depth - 1]
    cdef lf_span *spans = walk.spans + frame.spans
    cdef size_t count = walk.span_count - frame.spans
    cdef lf_buffer *kept
    if frame.unsorted:
        sync(walk)
        end_span(walk, frame)
        lf_sort_names(walk.canonical.data, spans, count)
        if lf_reorder(&walk.canonical, &walk.spare, frame.canonical, spans, count, 0) < 0:
            no_memory()
    elif frame.kind == IN_BAG:
        end_span(walk, frame)
        sync(walk)
        if count > 1:
            kept = &walk.kept if walk.want_kept else NULL
            if lf_sort_set(
                &walk.canonical, kept, &walk.spare, frame.canonical, frame.kept, spans, count
            ) < 0:
                no_memory()
        if frame.lends:
            walk.want_canonical = False
            walk.canonical.size = 0
    put_byte(walk, c"}" if frame.kind >= IN_DICT else c"]")
    pop(walk)
    return 0


cdef int run(Walk *walk, object value) except -1:
    """Write the whole of `value` to the buffers that are wanted."""
    cdef PyObject *member
    if not put_scalar(walk, <PyObject *>value):
        enter(walk, <PyObject *>value)
    while walk.depth:
        member = next_value(walk, &walk.frames[walk.depth - 1])
        if member == NULL:
            leave(walk)
        elif not put_scalar(walk, member):
            enter(walk, member)
    return 0


# --- the kernel ----------------------------------------------------------------------------------


cdef bytes octets(object data):
    try:
        return memoryview(data).tobytes()
    except TypeError:
        raise BadInputError(f"expected bytes, not {_type_name(data)}") from None


def fnv1a64(data):
    """Return the FNV-1a 64 of the bytes of `data`, an unsigned integer."""
    cdef bytes text = data if type(data) is bytes else octets(data)
    return lf_fnv(<const uint8_t *>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


def fnv1a64_limbs(data):
    """Return the same as `fnv1a64`, by ADR 0102's formulation without 64-bit arithmetic."""
    cdef bytes text = data if type(data) is bytes else octets(data)
    return lf_fnv_limbs(<const uint8_t *>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


def canonical(value):
    """Return the canonical JSON of `value` (RFC 8785), in UTF-8. See `_pure.digest.canonical`."""
    cdef Walk *walk = take(True, False)
    try:
        run(walk, value)
        return PyBytes_FromStringAndSize(<char *>walk.canonical.data, walk.canonical.size)
    finally:
        unwind(walk)
        give_back(walk)


def encode(value):
    """Return the persisted JSON of `value`, in UTF-8. See `_pure.digest.encode`."""
    cdef Walk *walk = take(False, True)
    try:
        run(walk, value)
        return PyBytes_FromStringAndSize(<char *>walk.kept.data, walk.kept.size)
    finally:
        unwind(walk)
        give_back(walk)


def decode(data):
    """Return the value that `data` (bytes-like, or str) spells in JSON. See `_pure.digest.decode`."""
    cdef bytes text
    if type(data) is bytes:
        text = data
    elif isinstance(data, str):
        data = str.__str__(data)
        try:
            text = data.encode("utf-8")
        except UnicodeEncodeError as error:
            at = len(data[: error.start].encode("utf-8"))
            raise JsonTextError(at, "half of a surrogate pair") from None
    else:
        text = octets(data)
    if lf_plain_to_read(<const uint8_t *>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), LEVELS):
        try:
            return _loads(text)
        except _JSONDecodeError:
            # The exact parser reports it, so that both kernels say the same.
            pass
    return _parse(text)


cdef int run_emit(Walk *walk, object segment, object event_type, object payload) except -1:
    """Write `segment|[event_type,payload]` to the canonical buffer, the payload to the other if wanted."""
    cdef bint want_kept = walk.want_kept
    if type(segment) is not int:
        if not issubclass(type(segment), int) or type(segment) is bool:
            raise BadInputError(f"segment must be an integer, not {_type_name(segment)}")
        segment = int.__int__(segment)
    if segment < 0:
        raise BadInputError("segment must be at least 0")
    if type(event_type) is not str:
        if not issubclass(type(event_type), str):
            raise BadInputError(f"event_type must be text, not {_type_name(event_type)}")
        event_type = str.__str__(event_type)
    walk.want_kept = False
    put_int(walk, <PyObject *>segment)
    put_word(walk, b"|[\0\0\0\0\0\0", 2)
    put_scalar(walk, <PyObject *>event_type)
    put_byte(walk, c",")
    walk.want_kept = want_kept
    walk.copied = walk.canonical.size
    run(walk, payload)
    sync(walk)
    walk.want_kept = False
    put_byte(walk, c"]")
    return 0


def digest(segment, event_type, payload):
    """Return the identity of an emit. See `_pure.digest.digest`."""
    cdef Walk *walk = take(True, False)
    try:
        run_emit(walk, segment, event_type, payload)
        return lf_fnv(walk.canonical.data, walk.canonical.size)
    finally:
        unwind(walk)
        give_back(walk)


def encode_digest(segment, event_type, payload):
    """Return `(encode(payload), digest(segment, event_type, payload))`. See `_pure.digest.encode_digest`."""
    cdef Walk *walk = take(True, True)
    try:
        run_emit(walk, segment, event_type, payload)
        text = PyBytes_FromStringAndSize(<char *>walk.kept.data, walk.kept.size)
        return text, lf_fnv(walk.canonical.data, walk.canonical.size)
    finally:
        unwind(walk)
        give_back(walk)


def format_digest(value):
    """Return `value` as 16 lower-case hex digits. See `_pure.digest.format_digest`."""
    cdef uint64_t rest
    cdef char text[16]
    cdef int at
    if not issubclass(type(value), int) or type(value) is bool:
        raise BadInputError(f"a digest is an integer, not {_type_name(value)}")
    value = int.__int__(value)
    try:
        rest = value
    except OverflowError:
        raise BadInputError("a digest is an unsigned 64-bit integer") from None
    for at in range(16):
        text[15 - at] = b"0123456789abcdef"[rest & 15]
        rest >>= 4
    return text[:16].decode("ascii")


def parse_digest(text):
    """Return the integer that 16 lower-case hex digits spell. See `_pure.digest.parse_digest`."""
    cdef uint64_t value = 0
    cdef int char, at
    if not issubclass(type(text), str):
        raise BadInputError(f"a digest is 16 lower-case hex digits, not {_type_name(text)}")
    cdef str exact = str.__str__(text)
    if len(exact) == 16:
        for at in range(16):
            char = <int><Py_UCS4>exact[at]
            if 48 <= char <= 57:  # 0 to 9
                value = value << 4 | <uint64_t>(char - 48)
            elif 97 <= char <= 102:  # a to f
                value = value << 4 | <uint64_t>(char - 87)
            else:
                break
        else:
            return value
    raise BadInputError(f"a digest is 16 lower-case hex digits, not {exact[:32]!a}")


def _chain_seconds(data, rounds):
    """Return the seconds that `rounds` passes of FNV's bare xor-and-multiply chain over `data` take in C.

    For the benchmarks: no implementation of FNV-1a can be faster than this.
    """
    cdef bytes text = data
    cdef size_t count = rounds
    cdef uint64_t value
    begin = _perf_counter()
    value = lf_chain(<const uint8_t *>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), count)
    seconds = _perf_counter() - begin
    # The result is used, so that the loop cannot be dropped.
    return seconds if value else seconds + 0.0


# --- at import -----------------------------------------------------------------------------------


# An object: of C numbers, `**` would be a float's.
cdef object _TEN = 10


def _fill_powers():
    """Fill the table of powers of ten: 128 bits of each, rounded up."""
    cdef object ten, value, bits
    cdef lf_power *entry
    cdef int power
    for power in range(LF_POWER_LOW, LF_POWER_HIGH + 1):
        ten = _TEN ** <object>abs(power)
        if power >= 0:
            bits = ten.bit_length()
            value = ten << 128 - bits if bits <= 128 else -(-ten >> bits - 128)
        else:
            # The quotient has 128 bits, or 129.
            value = -(-(1 << ten.bit_length() + 127) // ten)
            if value.bit_length() > 128:
                value = -(-value >> 1)
        entry = &lf_powers[power - LF_POWER_LOW]
        entry.high = value >> 64
        entry.low = value & 0xFFFFFFFFFFFFFFFF


_fill_powers()
