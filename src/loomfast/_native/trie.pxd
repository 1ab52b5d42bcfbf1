"""What the native fold needs of the native maps: their fields and the calls below the argument checks."""

from loomfast._native.lineage cimport Version
from loomfast._native.nodes cimport u64


cdef class Trie:
    cdef Version at

    cdef u64 count(self, u64 digest) except? 0
    cdef Trie bumped(self, u64 digest)
    cdef Trie drafted(self)
    cdef int bump_drafted(self, u64 digest) except -1


cdef class Table:
    cdef Version at

    cdef object found(self, object key)
    cdef Table changed(self, object key, object value)
    cdef Table drafted(self)
    cdef int change_drafted(self, object key, object value) except -1
