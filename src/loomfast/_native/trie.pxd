"""What the native fold needs of the native maps: their fields and the calls below the argument checks."""

from cpython.object cimport PyObject

from loomfast._native.lineage cimport Version
from loomfast._native.nodes cimport u64


cdef class Trie:
    cdef Version at

    cdef u64 count(self, u64 digest) except? 0
    cdef Trie bumped(self, u64 digest)
    cdef Trie drafted(self)
    cdef int bump_drafted(self, u64 digest) except -1
    cdef int bump_all(self, u64* digests, size_t size, u64* scratch) except -1


cdef class Table:
    cdef Version at

    cdef Table drafted(self)
    cdef object exchange(self, object key, object value)
    cdef PyObject* sole(self, object key) except? NULL
