"""What other native kernels need of an envelope: its fields."""

from loomfast._native.nodes cimport u64


cdef class Envelope:
    cdef readonly object execution_id  # first what every fold reads: one cache line
    cdef readonly long long sequence
    cdef readonly int kind
    cdef bint stamped
    cdef u64 digest
    cdef readonly object subject
    cdef readonly object body
    cdef readonly object event_type
    cdef readonly object timestamp
    cdef readonly object fence
    cdef readonly object extra
